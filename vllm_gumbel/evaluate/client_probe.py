"""Finds out what a server is: its model, what it can be asked for, and whose noise its tokens are drawn with."""

import asyncio
import socket
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from vllm_gumbel.evaluate.client import (
    ClientError,
    Endpoint,
    Features,
    Patience,
    RefusedError,
    ask,
    fetch,
)
from vllm_gumbel.evaluate.prompts import Prompt
from vllm_gumbel.metrics import catalogue, scrape
from vllm_gumbel.metrics.scrape import Scrape, ScrapeError

#: What other servers than vLLM are tried with, until they take it.
LADDER = (Features(logprobs=True), Features(logprobs=False))
#: Names that a message shows at most.
SHOWN_NAMES = 8

Noise = Literal["gumbel", "stock"]


class Sampler(NamedTuple):
    """Who draws a server's tokens.

    Attributes:
        name: `gumbel`, `default` for vLLM's own, None if nobody knows.
        noise: whose noise it draws with; None if it is keyed by nothing that both sides share.
        noise_version: of the noise `gumbel`.
        why: in words, how that is known.
    """

    name: Literal["gumbel", "default"] | None
    noise: Noise | None
    noise_version: int | None
    why: str


@dataclass(frozen=True)
class Side:
    """One of the two that are compared.

    Attributes:
        role: `baseline` or `candidate`.
        endpoint: where its texts come from.
        is_vllm: whether it is a vLLM server.
        context: tokens that prompt and output may have together; None if it does not say.
        sampler: who draws.
        settings: sampling parameters of this side alone.
    """

    role: str
    endpoint: Endpoint
    is_vllm: bool
    context: int | None
    sampler: Sampler
    settings: dict[str, Any]

    @property
    def is_salted(self) -> bool:
        """Whether a salt reaches its noise."""
        return self.sampler.noise == "gumbel"


async def look(
    role: str,
    endpoint: Endpoint,
    settings: dict[str, Any],
    prompts: list[Prompt],
    *,
    chat: bool,
    timeout: float,
    patience: Patience,
) -> Side:
    """Return what a server is.

    Args:
        role: of the side.
        endpoint: the server; an empty name stands for the only model that it has.
        settings: sampling parameters of this side alone.
        prompts: that it will be asked, of which one of each kind is tried where features are in doubt.
        chat: whether texts are sent as chats.
        timeout: seconds without a byte.
        patience: of each request.

    Raises:
        ClientError: it does not answer, serves no such model, or refuses every form of a request.
    """
    async with endpoint.client(timeout, 2) as http:
        listed = await patience.repeated(lambda: fetch(http, "/v1/models"))
        card = _model(listed, endpoint)
        is_vllm = card.get("owned_by") == "vllm"
        context = card.get("max_model_len")
        found = replace(endpoint, name=card["id"])
        if is_vllm:
            found = replace(found, features=Features(token_ids=True, logprobs=True))
        else:
            for prompt in {prompt.messages is None and not chat: prompt for prompt in prompts}.values():
                found = await _tried(http, found, prompt, chat, patience)
    sampler = await asyncio.to_thread(_sampler, endpoint.url, is_vllm, settings)
    return Side(role, found, is_vllm, context if isinstance(context, int) else None, sampler, settings)


def coupling(baseline: Side, candidate: Side) -> tuple[bool, str]:
    """Return whether equal seeds mean equal luck on both sides, and why in words."""
    for side in (baseline, candidate):
        if side.sampler.noise is None:
            return False, f"not coupled: the {side.role} draws with noise of its own, since {side.sampler.why}"
    ours, theirs = baseline.sampler, candidate.sampler
    if (ours.noise, ours.noise_version) != (theirs.noise, theirs.noise_version):
        return False, "not coupled: the sides draw with different noise, {} and {}".format(
            *(f"{each.noise} {each.noise_version or ''}".strip() for each in (ours, theirs))
        )
    if baseline.settings.get("gumbel_salt") != candidate.settings.get("gumbel_salt"):
        return False, "not coupled: the sides were given different salts"
    if ours.noise == "stock":
        return True, "coupled: both sides draw with vLLM's own noise of runner V2, and were given the same seeds"
    return True, (
        f"coupled: both sides draw with this package's noise, version {ours.noise_version}, and were given the same "
        "seeds, and a salt for each prompt"
    )


def same_machine(ours: str, theirs: str) -> bool:
    """Return whether two addresses lead to one machine, as far as names say."""
    addresses = []
    for url in (ours, theirs):
        host = urlsplit(url).hostname or ""
        try:
            addresses.append({found[4][0] for found in socket.getaddrinfo(host, None)})
        except OSError:
            addresses.append({host})
    return bool(addresses[0] & addresses[1])


def _model(listed: Any, endpoint: Endpoint) -> dict[str, Any]:
    """Return what a server says about the model that is meant."""
    try:
        cards = {card["id"]: card for card in listed["data"]}
    except (KeyError, TypeError):
        raise ClientError(f"{endpoint.url}/v1/models has not the form of OpenAI's API") from None
    names = ", ".join(list(cards)[:SHOWN_NAMES])
    if endpoint.name:
        if endpoint.name not in cards:
            raise ClientError(f"{endpoint.url} serves no {endpoint.name!r} but {names}")
        return dict(cards[endpoint.name])
    if len(cards) != 1:
        what = f"serves {len(cards)} models, so say which ({names})" if cards else "serves no model"
        raise ClientError(f"{endpoint.url} {what}: --baseline-name, --candidate-name")
    return dict(next(iter(cards.values())))


async def _tried(http: Any, endpoint: Endpoint, prompt: Prompt, chat: bool, patience: Patience) -> Endpoint:
    """Return the endpoint with the first features that it takes for a request like a prompt's."""
    short = prompt.model_copy(update={"prompt": prompt.prompt and "Hello", "references": []})
    refusal: RefusedError | None = None
    for features in LADDER:
        if features.logprobs > endpoint.features.logprobs:
            continue
        candidate = replace(endpoint, features=features)
        try:
            await patience.repeated(partial(ask, http, candidate, short, {"max_tokens": 1}, "trial", chat))
            return candidate
        except RefusedError as error:
            refusal = error
            if error.status == 404:
                break
    raise ClientError(
        f"{endpoint.url}{refusal} (a server with chats alone needs --chat, one without needs prompts without messages)"
    )


def _sampler(url: str, is_vllm: bool, settings: dict[str, Any]) -> Sampler:
    """Return who draws, as a server's metrics say."""
    stock: Literal["default"] | None = "default" if is_vllm else None
    try:
        page = scrape.fetch(url)
    except ScrapeError as error:
        return Sampler(stock, None, None, f"its metrics do not show this package ({error})")
    builds = {labels.get("noise_version", "") for labels, value in page.series(catalogue.BUILD_INFO) if value > 0}
    if not builds:
        return Sampler(stock, None, None, "its metrics show no build of this package")
    if settings.get("gumbel_sampler") == "default":
        return Sampler("default", None, None, "it was told to draw with vLLM's own sampler")
    if _any(page, catalogue.BREAKER_OPEN):
        return Sampler("default", None, None, "its breaker is open")
    if len(builds) > 1:
        return Sampler("gumbel", None, None, f"its workers disagree about the noise ({', '.join(sorted(builds))})")
    (noise,) = builds
    if noise.isdigit():
        return Sampler("gumbel", "gumbel", int(noise), f"its metrics say so ({page.address})")
    if noise == "stock":
        return Sampler("gumbel", "stock", None, f"its metrics say so ({page.address})")
    return Sampler("gumbel", None, None, f"its noise is unknown here ({noise})")


def _any(page: Scrape, metric: catalogue.Metric) -> bool:
    return any(value > 0 for _, value in page.series(metric))
