"""What a client of the real server can reach with what it may choose: no file, no code, no growing state, no secret."""

import asyncio
import json
from http import HTTPStatus

import httpx
import pytest

MARKER = "zebra-quartz-1789"


def shown(server):
    """Return every series of ours on `/metrics`, without its value."""
    page = server.client.get("/metrics").text
    return {line.rpartition(" ")[0] for line in page.splitlines() if line.startswith("vllm_gumbel_")}


def flood(server, requests):
    """Post completions, (body, headers) each, 32 at a time; return their statuses."""

    async def run():
        limits = httpx.Limits(max_connections=32)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            posts = [
                client.post("/v1/completions", json={"model": "smollm2", "max_tokens": 1, **body}, headers=headers)
                for body, headers in requests
            ]
            return [answer.status_code for answer in await asyncio.gather(*posts)]

    return asyncio.run(run())


def chosen_by_client(i):
    """Return a request whose every name is its own."""
    keys = {"gumbel_rollout_key": f"{MARKER} user {i}", "gumbel_salt": i, "gumbel_return_info": 1}
    return {"prompt": f"{MARKER} {i}", "user": f"{MARKER} {i}", "vllm_xargs": keys}, {"X-Request-Id": f"{MARKER}-{i}"}


def refused(i):
    """Return a request with a key, and a value, of the client's invention."""
    return {"prompt": "x", "vllm_xargs": {f"gumbel_{MARKER}_{i}": f"{MARKER} {i}"}}, {}


def test_names_that_clients_choose_neither_make_series_nor_are_shown(server):
    """Rollout keys, salts, ids, users and unknown keys, 200 different ones each; nor does the log tell a prompt."""
    flood(server, [chosen_by_client(0), refused(0)])
    before = shown(server)
    assert len(before) > 20
    wanted = [chosen_by_client(i) for i in range(1, 201)]
    assert flood(server, wanted) == [HTTPStatus.OK] * 200
    assert flood(server, [refused(i) for i in range(1, 201)]) == [HTTPStatus.BAD_REQUEST] * 200
    assert shown(server) == before
    assert MARKER not in server.client.get("/metrics").text
    assert MARKER not in server.log.read_text()


def test_id_as_long_as_a_header_may_be_is_served(server):
    keys = {"gumbel_return_info": 1}
    assert flood(server, [({"prompt": "x", "vllm_xargs": keys}, {"X-Request-Id": "i" * 50_000})]) == [HTTPStatus.OK]


@pytest.mark.parametrize(
    "value",
    [
        "/etc/passwd",
        "../../etc/passwd",
        "os:system",
        "vllm.v1.sample.sampler:Sampler",
        "{7*7}",
        "$(id)",
        "\0",
        "x" * 10**6,
    ],
    ids=lambda value: repr(value[:20]),
)
def test_no_key_takes_a_path_or_code(server, value):
    """Text that could name something is refused by every key but the one that is only hashed."""
    for key in ("gumbel_sampler", "gumbel_preset", "gumbel_temperature_rule", "gumbel_salt", "gumbel_hybrid_steps"):
        response = server.complete(prompt="x", max_tokens=1, vllm_xargs={key: value})
        assert response.status_code == HTTPStatus.BAD_REQUEST, (key, value[:20])
        assert len(response.text) < 1000, "a refusal repeats little of what it refuses"
    response = server.complete(prompt="x", max_tokens=1, vllm_xargs={"gumbel_rollout_key": value})
    assert response.status_code == (HTTPStatus.OK if len(value) <= 256 else HTTPStatus.BAD_REQUEST)


def test_routes_of_the_operator_are_closed(server):
    """The rollout's route where nobody asked for it, and vLLM's own way to the workers outside its development mode."""
    for path in ("/gumbel/rollout", "/collective_rpc"):
        for answer in (server.client.get(path), server.client.post(path, json={"method": "gumbel_seeds"})):
            assert answer.status_code == HTTPStatus.NOT_FOUND, (path, answer.text)


def test_deeply_nested_arguments_are_a_400(server):
    content = json.dumps({"model": "smollm2", "prompt": "x"})[:-1] + ', "vllm_xargs": {"gumbel_salt": ' + "[" * 50_000
    response = server.client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == HTTPStatus.BAD_REQUEST
    assert server.tokens(prompt="x", max_tokens=2, ignore_eos=True)
