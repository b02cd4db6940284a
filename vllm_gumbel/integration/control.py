"""HTTP routes that read and change the rollout while the server runs: an endpoint plugin of vLLM.

vLLM loads it only if `VLLM_PLUGINS` names `vllm_gumbel_rollout`. vLLM's `--api-key` guards `/v1` alone, so the routes
have a key of their own: the environment variable `GUMBEL_ADMIN_KEY` of the server. Without it they answer 403.
"""

import asyncio
import hmac
import json
import logging
import os
from typing import Any

from vllm_gumbel.rollout.client import KEY_VARIABLE, PATH
from vllm_gumbel.rollout.state import ChangeError, Rollout, checked

logger = logging.getLogger("vllm.gumbel")

#: Seconds that the workers may take to answer; they do so between two steps.
TIMEOUT = 60.0
#: Seconds between two looks whether the engine is still there.
LOOK = 0.5

#: Bytes of a request at most.
LARGEST_BODY = 4096


class RolloutEndpoint:
    """The routes `GET` and `POST` of `PATH`; see vLLM's `EndpointPlugin`."""

    name = "vllm_gumbel_rollout"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Add the routes to a FastAPI application."""
        from fastapi import Request
        from fastapi.responses import JSONResponse

        async def answer(request: Request) -> JSONResponse:
            refused = refusal(request.headers.get("Authorization", ""))
            if refused is not None:
                return JSONResponse({"error": refused[1]}, refused[0])
            change = None
            if request.method == "POST":
                try:
                    change = checked(_parsed(await request.body()))
                except ChangeError as error:
                    return JSONResponse({"error": str(error)}, 400)
            try:
                return JSONResponse(await _ask(request.app.state.engine_client, change))
            except Exception as error:  # whatever it is, the operator has to know, and the server goes on
                logger.warning("vllm-gumbel: rollout: the workers cannot be reached: %r", error)
                return JSONResponse({"error": f"the workers cannot be reached: {error}"}, 503)

        answer.__annotations__["request"] = Request  # or FastAPI takes it for a parameter of the query
        app.add_api_route(PATH, answer, methods=["GET", "POST"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Say in the log that the routes are there."""
        said = "is set" if os.environ.get(KEY_VARIABLE) else "is not set, so every request to it is refused"
        logger.info("vllm-gumbel: %s controls the rollout; %s %s", PATH, KEY_VARIABLE, said)


def in_worker(runner: Any, change: str | None = None) -> dict[str, Any]:
    """Change the rollout of a worker, and return its state.

    Args:
        runner: the worker's model runner.
        change: as JSON; None changes nothing.

    Raises:
        ChangeError: the sampler has no rollout, or it is no change.
    """
    rollout: Rollout | None = getattr(getattr(runner, "sampler", None), "rollout", None)
    if rollout is None:
        raise ChangeError("this worker's sampler has no rollout")
    if change is not None:
        rollout.change(json.loads(change))
    return rollout.status()


async def _ask(engine: Any, change: dict[str, Any] | None) -> dict[str, Any]:
    """Return the state after a change that all workers made.

    vLLM leaves a call unanswered for ever whose engine dies meanwhile, so that is looked for here.
    """
    arguments = () if change is None else (json.dumps(change),)
    call = asyncio.ensure_future(engine.collective_rpc("gumbel_rollout", timeout=TIMEOUT, args=arguments))
    try:
        async with asyncio.timeout(TIMEOUT + 10):
            while not (await asyncio.wait({call}, timeout=LOOK))[0]:
                if engine.errored:
                    raise engine.dead_error
    finally:
        call.cancel()
    states: list[dict[str, Any]] = call.result()
    opened = [state for state in states if state["breaker"]["open"]]
    return {**(opened or states)[0], "workers": len(states)}


def refusal(authorization: str) -> tuple[int, str] | None:
    """Return status and reason if a request may not be answered."""
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        return 403, f"the server was started without {KEY_VARIABLE}, so nobody may read or change its rollout"
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), key.encode()):
        return 401, "the header `Authorization: Bearer KEY` is missing or has another key than the server"
    return None


def _parsed(body: bytes) -> Any:
    """Return what a request's body means.

    Raises:
        ChangeError: it is no JSON, or too long.
    """
    if len(body) > LARGEST_BODY:
        raise ChangeError(f"a change has at most {LARGEST_BODY} bytes, got {len(body)}")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:  # the first also for bytes that are no text
        raise ChangeError(f"a change must be JSON: {error}") from None
