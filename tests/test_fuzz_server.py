"""Hundreds of random requests to a real server at a time: `scripts/fuzz_server.py`, which sends more of them."""

import json
from collections import Counter

import numpy as np
import pytest

from scripts import fuzz_client, fuzz_server
from scripts.fuzz_client import Answer, differing, wrong_with
from scripts.fuzz_counts import Page, miscounted, token_bounds
from scripts.fuzz_model import USABLE, VOCAB, table, write_table_model
from scripts.fuzz_requests import LONGEST, Request
from scripts.fuzz_server import KINDS, make
from scripts.fuzz_wild import KIND_OF

SEED, REQUESTS, COMPARED = 7, 300, 60


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    """The report of a fuzz."""
    from tests.serving import serving

    folder = tmp_path_factory.mktemp("fuzz")
    requests = [make(SEED, number) for number in range(REQUESTS)]
    flags = (*fuzz_server.FLAGS, *fuzz_server.HARD, *fuzz_server.SMALL_CACHE, "--sampler", "gumbel")
    with serving(write_table_model(folder / "model"), folder / "log", *flags) as server:
        return fuzz_server.fuzz(server.url, requests, concurrency=48, compare=COMPARED, seed=SEED)


def test_every_request_gets_what_it_should_and_the_server_lives(fuzzed):
    """No 5xx, no silence; legal requests are answered, wrong ones refused with words; the rest is either."""
    found = [f"--seed {SEED} --only {request.number}: {wrong}" for request, wrong in fuzzed.failures]
    assert not found, "scripts/fuzz_server.py " + "\n".join(found)
    kinds = {kind for kind, _ in fuzzed.seen}
    assert kinds == {kind.__name__ for kind in KINDS}
    assert fuzzed.seen["served", "200"] > 150
    assert fuzzed.seen["refused", "400"] > 30
    assert fuzzed.compared == COMPARED


def test_counters_agree_with_what_clients_saw(fuzzed):
    assert fuzzed.complaints == []
    assert fuzzed.tokens > 1_000


def test_equal_seeds_give_equal_requests():
    first = [make(3, number) for number in range(200)]
    assert [make(3, number) for number in reversed(range(200))] == first[::-1]
    assert [make(4, number).content for number in range(200)] != [each.content for each in first]
    assert {each.kind for each in first} == {kind.__name__ for kind in KINDS}


def test_every_field_of_the_endpoints_is_tried():
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    assert {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields} <= KIND_OF.keys()
    sent = set()
    for number in range(3_000):
        request = make(1, number)
        if request.kind == "served":
            sent |= json.loads(request.content).keys()
    assert len(sent) > 45


def test_table_is_the_model(tmp_path):
    """The network gives the row of the last token, to a few bits, whatever comes before."""
    from vllm_gumbel.evaluate.logits import Network

    network = Network(write_table_model(tmp_path))
    rows = network.next_rows((5, 200, 17), network.session())
    np.testing.assert_allclose(rows, table(0)[17], rtol=1e-5, atol=1e-5)
    assert (table(0)[:, :USABLE].max(axis=1) > table(0)[:, USABLE:].max()).all()


def request(**fields):
    return Request(**({"number": 0, "kind": "served", "path": "/", "content": "", "choices": 1, "longest": 3} | fields))


def answer(*tokens, status=200, **fields):
    return Answer(status=status, texts={0: list(tokens)}, endings={0: "length None"}, **fields)


@pytest.mark.parametrize(
    ("asked", "got", "said"),
    [
        (request(), answer(1, 2), None),
        (request(), answer(1, 2, 3, 4), "more than 3 tokens"),
        (request(), answer(VOCAB), "an id that does not exist"),
        (request(choices=2), answer(1), "1 choices where 2"),
        (request(choices=3, beams=True), answer(1), None),
        (request(), Answer(200, texts={0: [1]}), "and [] ended"),
        (request(), Answer(400, "no"), "refused, 400: no"),
        (request(), Answer(500, "oh"), "500: oh"),
        (request(), Answer(0, "ReadError"), "no status: ReadError"),
        (request(kind="refused", says="gumbel_salt"), Answer(400, "gumbel_salt must"), None),
        (request(kind="refused", says="gumbel_salt"), Answer(400, "no"), "refused without 'gumbel_salt'"),
        (request(kind="refused"), Answer(400), "400 without a word"),
        (request(kind="refused"), answer(1), "answered, though it is refused"),
        (request(kind="wild"), Answer(503, "later"), "503: later"),
        (request(kind="wild"), Answer(422, "no"), None),
        (request(), Answer(200, left=True), None),
    ],
)
def test_what_is_wrong_with_an_answer_is_said(asked, got, said):
    found = wrong_with(asked, got)
    assert found is None if said is None else said in found


def test_another_token_alone_is_a_difference():
    assert differing(request(), answer(1, 2), answer(1, 2)) is None
    assert differing(request(), answer(1, 2), answer(1, 3))
    assert differing(request(), answer(1, 2), answer(1, 2, 3))
    assert differing(request(), Answer(200, texts={0: [1]}, left=True), answer(1, 2)) is None
    assert differing(request(), Answer(200, texts={0: [2]}, left=True), answer(1, 2))


def test_bounds_of_the_tokens_drawn():
    """What came; one more for a text that ended by itself, the rest for one that was left."""
    stopped = Answer(200, texts={0: [1, 2]}, endings={0: "stop None"})
    left = Answer(200, texts={0: [1]}, left=True)
    assert token_bounds([(request(), answer(1, 2, 3))]) == (3, 3)
    assert token_bounds([(request(), stopped), (request(), left), (request(), Answer(400))]) == (3, 6)
    assert token_bounds([(request(kind="wild", longest=LONGEST), Answer(200, counted=7))]) == (7, 7)


def page(series=100, keys=("gumbel_salt",), **values):
    return Page(Counter({tuple(name.split()): value for name, value in values.items()}), set(keys), series)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (page(sampled_tokens_total=2, **{"rejected_params_total gumbel_salt": 1}), None),
        (page(sampled_tokens_total=3, **{"rejected_params_total gumbel_salt": 1}), "3 tokens counted, between 2 and 2"),
        (page(sampled_tokens_total=2), "0 refusals by gumbel_salt counted, 1 came"),
        (page(sampled_tokens_total=2, keys=("gumbel_salt", "mine"), series=900), "clients made labels: ['mine']"),
        (page(sampled_tokens_total=2, series=900), "100 series became 900"),
        (page(sampled_tokens_total=2, faults_total=1), "faults_total is 1"),
        (page(**{"anomalous_tokens_total nonfinite_logits": 4}), "anomalous_tokens_total nonfinite_logits is 4"),
    ],
)
def test_what_is_miscounted_is_said(after, said):
    pairs = [(request(), answer(1, 2)), (request(kind="refused"), Answer(400, "gumbel_salt must be an integer"))]
    found = miscounted(page(), after, pairs)
    assert found == [] if said is None else said in "; ".join(found)


def test_refusals_are_told_by_their_key():
    assert Answer(400, "gumbel_salt must be an integer, got '5'").key == "gumbel_salt"
    assert Answer(400, "gumbel_pepper is not a known parameter").key == "gumbel_pepper"
    assert Answer(400, "'gumbel_\\x00' is not a known parameter").key, "shown as text of Python"
    assert Answer(400, "top_p must be in (0, 1], got 0").key is None
    assert fuzz_client.Answer(200).key is None
