"""What vLLM's tests of its runner V2 sampler demand, demanded of ours on its real classes.

`Both` holds vLLM's sampler and ours over the same requests to equal logits before the draw, so that what a check claims
of them it claims of both.
"""

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.min_p import apply_min_p
from vllm.v1.worker.gpu.sample.sampler import Sampler

from tests.statistics import assert_goodness_of_fit
from tests.test_peer_processors import BUDGET, END, KINDS, NATURAL_END, START, thinking
from tests.v2.building import CPU, DRAFTS, Driver, configured, layout, random_logits
from vllm_gumbel.integration.speculative_v2 import Verifier

NAN, INFINITY, VOCAB = float("nan"), float("inf"), 300
SETTINGS = {"backend": "numba"}


class Both(Driver):
    """Our sampler and vLLM's over the same slots; requests at temperature 1, unless they say otherwise."""

    def __init__(self, config, requests, *, backend="numba"):
        config = configured(config)
        config.reasoning_config = thinking()
        super().__init__(config, slots=max(8, len(requests)), vocab=VOCAB, backend=backend)
        self.stock = Sampler(config, max(8, len(requests)), VOCAB, CPU, self.states)
        for i, request in enumerate(requests):
            each = {"prompt": (1, 2, 3), "output": (), "stop": None, "temperature": 1.0, **request}
            slot = self.add(str(i), **each)
            sampling = {k: v for k, v in each.items() if k not in ("prompt", "output", "stop", "bad_ids")}
            params = SamplingParams(**sampling, _bad_words_token_ids=each.get("bad_ids"))
            params.update_from_generation_config({}, each["stop"])
            self.stock.add_request(slot, params)
        self.stock.apply_staged_writes()

    def before(self, logits, drafts=None, names=None):
        """Return float32 logits after all that comes before the draw, equal from either sampler."""
        batch = self.batch(names, drafts)
        ours = self.sampler.edit(logits.clone(), *layout(batch))
        assert torch.equal(ours, self.stock.apply_sampling_params(logits.clone(), *layout(batch)))
        return ours.float()


def changed(before, after):
    """Return (row, id) -> new value, of what differs."""
    return {(row, token): float(after[row, token]) for row, token in torch.nonzero(before != after).tolist()}


@pytest.fixture(scope="module")
def speculation(model_path):
    """vLLM's configuration of drafts."""
    drafts = {"method": "draft_model", "model": str(model_path), "num_speculative_tokens": DRAFTS}
    arguments = EngineArgs(str(model_path), dtype="float32", max_model_len=64, speculative_config=drafts)
    return arguments.create_engine_config().speculative_config


@pytest.mark.parametrize(
    ("word", "masked"),
    [
        ([12, 13, 40], {(2, 40): -INFINITY}),  # begins and ends in the drafts
        ([11, 12, 30], {(1, 30): -INFINITY}),  # begins in the output
        ([11, 11, 50], {}),  # the last token is not counted twice
        ([10, 11, 60], {(0, 60): -INFINITY}),  # is all in the output
        ([70], {(row, 70): -INFINITY for row in range(3)}),
    ],
)
def test_bad_word_is_masked_at_the_row_that_completes_its_beginning(config, word, masked):
    both = Both(config, [{"prompt": [5], "output": [10, 11], "bad_ids": [word]}])
    logits = torch.zeros(3, VOCAB)
    assert changed(logits, both.before(logits, {"0": [12, 13]})) == masked


@pytest.mark.parametrize("kinds", [(True,), (False,), (True, False)])
def test_least_length_leaves_a_grammar_its_last_token(config, kinds):
    """Request by request; where another token is left, stop ids are masked for all."""
    schema = StructuredOutputsParams(json={"type": "boolean"})
    requests = [
        {"min_tokens": 10, "stop_token_ids": [3], "structured_outputs": schema if structured else None}
        for structured in kinds
    ]
    logits = torch.full((len(kinds), VOCAB), -INFINITY)
    logits[:, 3] = 1.0
    both = Both(config, requests)
    assert [float(row[3]) for row in both.before(logits)] == [1.0 if structured else -INFINITY for structured in kinds]
    assert both.tokens(logits) == [3] * len(kinds), "a row without a token ends its request"
    logits[:, 4] = 2.0
    assert changed(logits, both.before(logits)) == {(row, 3): -INFINITY for row in range(len(kinds))}


class Boost(LogitsProcessor):
    """Adds 100 to id 7 and keeps what it was called with."""

    def __init__(self, vllm_config, req_states):
        self.calls, self.seen = [], None

    def add_request(self, req_idx, sampling_params):
        """Note the slot; every request is changed."""
        self.calls.append(f"add {req_idx}")
        return True

    def apply_staged_writes(self):
        """Note the call."""
        self.calls.append("stage")

    def apply(self, logits, ctx):
        """Change and return the logits."""
        self.calls.append("apply")
        self.seen = logits.clone()
        logits[:, 7] += 100
        return logits


def test_processor_of_another_package_acts_after_the_bias_and_before_the_temperature(config):
    boost = Boost(None, None)
    driver = Driver(config, vocab=VOCAB, stock={"custom_logits_processors": [boost]}, **SETTINGS)
    slot = driver.add("one", temperature=2.0, logit_bias={7: 5.0})
    values = driver.sampler.apply_sampling_params(torch.zeros(1, VOCAB), *layout(driver.batch()))
    assert boost.calls == [f"add {slot}", "stage", "apply"]
    assert (boost.seen[0, 7], boost.seen[0, 8]) == (5.0, 0.0)
    assert values[0, 7] == 52.5
    assert driver.tokens(torch.zeros(1, VOCAB)) == [7]


@pytest.mark.parametrize(
    ("asked", "copies"),
    [
        ({"logit_bias": {3: 1.0}}, True),
        ({"presence_penalty": 0.5}, True),
        ({"bad_ids": [[3]]}, True),
        ({"thinking_token_budget": 2}, True),
        ({"temperature": 0.5}, False),
        ({"temperature": 0.0}, False),
        ({"min_p": 0.1}, False),
        ({"top_k": 10}, False),
        ({"top_p": 0.9}, False),
        ({}, False),
    ],
    ids=str,
)
def test_logits_are_copied_to_float32_only_for_requests_that_change_them(config, asked, copies):
    """vLLM copies for a temperature and filters too. What a request outside the step asks for counts for nothing."""
    config = configured(config)
    config.reasoning_config = thinking()
    driver = Driver(config, vocab=VOCAB, **SETTINGS)
    for name, request in (("plain", {}), ("asks", asked), ("other", {})):
        driver.add(name, **request)
    logits = random_logits(2, VOCAB, dtype=torch.bfloat16)
    assert driver.sampler.edit(logits, *layout(driver.batch(["plain", "other"]))) is logits
    edited = driver.sampler.edit(logits, *layout(driver.batch(["plain", "asks"])))
    assert (edited is not logits) == copies
    assert edited.dtype == (torch.float32 if copies else torch.bfloat16)


def test_edits_of_random_requests_are_vllms_with_drafts_and_without(config):
    """To the last bit: every kind alone and together, with histories and drafts that meet what they ask for."""
    rng = np.random.default_rng(0)
    kinds = [kind for name, kind in KINDS.items() if name != "forced"]
    requests = [
        {
            "prompt": [int(rng.choice([START, 22, rng.integers(VOCAB)])) for _ in range(4)],
            "output": [int(rng.choice([START, 22, 23, rng.integers(VOCAB)])) for _ in range(i % 7)],
            "stop": 7,
            **(kinds[i % len(kinds)] | {"min_p": 0.0}),
        }
        for i in range(3 * len(kinds))
    ]
    both = Both(config, requests)
    logits = random_logits(len(requests), VOCAB)
    assert changed(logits, both.before(logits))
    drafts = {str(i): [int(rng.choice([22, 23, START])) for _ in range(i % (DRAFTS + 1))] for i in range(len(requests))}
    logits = random_logits(len(requests) + sum(map(len, drafts.values())), VOCAB)
    assert changed(logits, both.before(logits, drafts))


@pytest.mark.parametrize(
    ("tokens", "drafts", "forced"),
    [
        ([START, 10, 11, 12], [], [END[0]]),
        ([START, 10, 11], [], [None]),
        ([START, 10, 11, 12], [END[0]], [END[0], END[1]]),
        ([START, 10], [11, 12, 13], [None, None, END[0], END[0]]),
        ([START, 10, *NATURAL_END, 20, 21, 22], [], [None]),
        ([START, 10, 11, 12, *NATURAL_END, 13, START, 14, 15, 16], [], [END[0]]),
    ],
    ids=["spent", "not yet", "goes on", "in a draft", "ended by itself", "second block"],
)
def test_thinking_budget_forces_the_end(config, tokens, drafts, forced):
    """Also an end that was masked; a request without a budget thinks on."""
    both = Both(config, [{"output": tokens, "thinking_token_budget": BUDGET}, {"output": tokens}])
    rows = len(drafts) + 1
    logits = torch.arange(float(rows + 1)).unsqueeze(1).repeat(1, VOCAB)
    logits[:, END] = -INFINITY
    found = both.before(logits, {"0": drafts})
    expected = {(row, token): 1e9 for row, token in enumerate(forced) if token is not None}
    assert changed(logits, found) == expected
    batch, states = both.batch(drafts={"0": drafts}), both.sampler.sampling_states
    arguments = (states.params(), batch.expanded_idx_mapping, batch.positions, states.filters(batch.idx_mapping_np))
    drawn = both.sampler.backend.draw(found, *arguments).tokens.tolist()
    assert all(token is None or drawn[row] == token for row, token in enumerate(forced))


@pytest.mark.parametrize("backend", ["triton", "numba"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_min_p_keeps_what_vllms_kernel_keeps(config, backend, dtype):
    """Slots in any order, rows with gaps, masked and infinite logits, none and one at the ends."""
    driver = Driver(config, vocab=VOCAB, backend=backend)
    shares = [0.1, 0.0, 1.0, 1e-6, 0.5, 0.1]
    for i, share in enumerate(shares):
        driver.add(str(i), temperature=1.0, min_p=share, seed=i)
    names = ["5", "1", "2", "0", "4", "3"]
    backing = torch.randn(6, VOCAB + 13, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits = backing[:, :VOCAB]
    logits[3, : VOCAB // 2], logits[4, -1] = -INFINITY, INFINITY
    batch, theirs = driver.batch(names), logits.clone()
    apply_min_p(theirs, batch.idx_mapping, driver.sampler.sampling_states.min_p.gpu)
    ours = driver.sampler.apply_sampling_params(logits, *layout(batch))
    assert torch.equal(ours > -INFINITY, theirs > -INFINITY)
    assert [int((row > -INFINITY).sum()) for row in ours[[1, 2, 4]]] == [VOCAB, 1, 1]


@pytest.mark.parametrize("backend", ["triton", "numba"])
def test_kept_sets_are_those_of_vllms_sort(config, backend):
    """top_k, top_p, both and neither in one batch, half of the rows masked as by a grammar."""
    vocab, rows = 1031, 16
    driver = Driver(config, slots=rows, vocab=vocab, backend=backend)
    k, p = [10, vocab, 50, 1] * 4, [1.0, 0.9, 0.5, 0.99] * 4
    for i in range(rows):
        driver.add(str(i), temperature=1.0, top_k=k[i], top_p=p[i], seed=i)
    logits = random_logits(rows, vocab)
    logits[::2, torch.randperm(vocab, generator=torch.Generator().manual_seed(0))[40:]] = -INFINITY
    theirs = apply_top_k_top_p_pytorch(logits.clone(), torch.tensor(k), torch.tensor(p)) > -INFINITY
    ours = driver.sampler.apply_sampling_params(logits.clone(), *layout(driver.batch())) > -INFINITY
    assert torch.equal(ours, theirs)
    assert all(ours[row, token] for row, token in enumerate(driver.tokens(logits)))


@pytest.mark.parametrize("vocab", [1, 100, 8193])
@pytest.mark.parametrize("mode", ["plain", "ties", "masked"])
def test_rank_counts_the_ids_that_are_no_worse_and_chosen_ids_get_their_values(config, vocab, mode):
    driver = Driver(config, vocab=vocab, **SETTINGS)
    chosen = sorted({0, vocab // 2, vocab - 1})
    for i in range(6):
        asked = {"logprobs": 0} if i % 3 else {"logprob_token_ids": chosen}
        driver.add(str(i), temperature=1.0, seed=i, **asked)
    backing = torch.randn(6, vocab + 37, generator=torch.Generator().manual_seed(vocab))
    logits = (backing.round() if mode == "ties" else backing)[:, :vocab]
    if mode == "masked":
        logits[:, 1::2] = -INFINITY
    output = driver.draw(logits.clone())
    tokens, found = output.sampled_token_ids, output.logprobs_tensors
    values = logits.log_softmax(-1)
    own = values.gather(1, tokens)
    assert found.selected_token_ranks.tolist() == (logits >= logits.gather(1, tokens)).sum(1).tolist()
    assert torch.allclose(found.logprobs[:, :1], own, atol=1e-5)
    assert (own > -INFINITY).all()
    for row in (0, 3):
        assert found.logprob_token_ids[row, 1:].tolist() == chosen
        assert torch.allclose(found.logprobs[row, 1:], values[row, chosen], atol=1e-5)


@pytest.mark.parametrize("verification", ["exact", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_missing_draft_is_not_accepted_and_ends_what_is(config, speculation, verification, temperature):
    """An id of -1, also before a good draft; the model's own token is sent in its place."""
    driver = Driver(config, slots=4, vocab=VOCAB, backend="numba", verification=verification)
    drafts = {"a": [1, -1, 3], "b": [-1, 2], "c": [1, 2, 3]}
    for i, name in enumerate(drafts):
        driver.add(name, temperature=temperature, seed=i)
    driver.step(random_logits(3, VOCAB))
    rows = torch.full((11, VOCAB), -100.0)
    rows[range(11), [1, 2, 3, 4, 1, 2, 3, 1, 2, 9, 5]] = 100.0
    output = Verifier(driver.sampler, speculation, CPU)(rows, driver.batch(drafts=drafts), None)
    found = [row[:n] for row, n in zip(output.sampled_token_ids.tolist(), output.num_sampled.tolist(), strict=True)]
    assert found == [[1, 2], [1], [1, 2, 9]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_nan_give_ids_of_the_vocabulary_to_their_request_alone(config, speculation, temperature):
    driver = Driver(config, slots=4, vocab=VOCAB, **SETTINGS)
    for i in range(3):
        driver.add(str(i), temperature=temperature, seed=i)
    driver.step(random_logits(3, VOCAB))
    drafts, logits = {str(i): [5, 6] for i in range(3)}, random_logits(9, VOCAB, seed=1)
    verifier, spoilt = Verifier(driver.sampler, speculation, CPU), logits.clone()
    spoilt[3:6] = NAN
    clean = verifier(logits, driver.batch(drafts=drafts), None)
    found = verifier(spoilt, driver.batch(drafts=drafts), None)
    for i in (0, 2):
        assert found.num_sampled[i] == clean.num_sampled[i]
        count = int(clean.num_sampled[i])
        assert torch.equal(found.sampled_token_ids[i, :count], clean.sampled_token_ids[i, :count])
    assert 1 <= int(found.num_sampled[1]) <= 3
    assert all(0 <= token < VOCAB for token in found.sampled_token_ids[1, : int(found.num_sampled[1])].tolist())


@pytest.mark.parametrize("verification", ["exact", "rejection"])
def test_what_is_sent_follows_the_target_at_every_place(config, speculation, verification):
    """250 requests with drafts from another law; false alarm 1e-6."""
    requests, vocab, steps = 250, 6, 2
    driver = Driver(config, slots=requests, vocab=vocab, backend="numba", verification=verification)
    for i in range(requests):
        driver.add(str(i), temperature=1.0, seed=i)
    source = torch.Generator().manual_seed(3)
    target = torch.randn(vocab, generator=source) / 2
    drafts = torch.multinomial((-target).softmax(-1).repeat(requests, 1), steps, replacement=True, generator=source)
    driver.step(target.repeat(requests, 1))
    batch = driver.batch(drafts={str(i): each for i, each in enumerate(drafts.tolist())})
    output = Verifier(driver.sampler, speculation, CPU)(target.repeat(requests * (steps + 1), 1), batch, None)
    for place in range(2):
        reached = output.sampled_token_ids[output.num_sampled > place, place]
        counts = torch.bincount(reached, minlength=vocab)
        assert len(reached) > 10
        assert_goodness_of_fit(observed=counts.numpy(), probabilities=target.softmax(-1).numpy(), claim=verification)
