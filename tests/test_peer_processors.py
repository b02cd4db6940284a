"""What vLLM's tests of its logits processors demand, demanded with our batch and sampler in place of vLLM's.

Its own processors (min_p, bias, least length), thinking budgets, and processors of others: as requests come and go.
"""

import random
from typing import ClassVar

import pytest
import torch
from vllm.config import ReasoningConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import InputBatch

from tests.test_peer_sampler import after_edits
from tests.test_rows import append, make_batch, make_request
from tests.test_v1_sampler import batch_of, draw, expected, processed, random_logits, tokens_of
from tests.test_v1_sampler import stock_kernels as stock_kernels  # a fixture of this module too
from vllm_gumbel.integration.rows import RowBatch
from vllm_gumbel.integration.v1 import GumbelSampler

VOCAB, START, END, NATURAL_END, BUDGET, STOP = 300, 90, [91, 92], [93], 3, 7


class ForceToken(LogitsProcessor):
    """Leaves a request that asks for it with `force` no other token; one state for the whole batch."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.forced = {}

    def is_argmax_invariant(self):
        """Return False: it decides what greedy decoding chooses."""
        return False

    def update_state(self, batch_update):
        """Follow requests as they come, move and go."""
        process_dict_updates(self.forced, batch_update, lambda params, _, __: (params.extra_args or {}).get("force"))

    def apply(self, logits):
        """Mask all but the token of each row that has one."""
        for row, token in self.forced.items():
            kept = logits[row, token].clone()
            logits[row] = -torch.inf
            logits[row, token] = kept
        return logits


class ForceCount(AdapterLogitsProcessor):
    """Leaves a request that asks for it with `force` the token `force` + the number of tokens it has generated."""

    seen: ClassVar[list] = []

    def is_argmax_invariant(self):
        """Return False: it decides what greedy decoding chooses."""
        return False

    def new_req_logits_processor(self, params):
        """Return what masks one request's rows; None if it does not ask."""
        token = (params.extra_args or {}).get("force")
        return None if token is None else lambda output, row: self.masked(row, token + len(output))

    def masked(self, row, token):
        """Return a row with one token left, and remember how it came."""
        self.seen.append(row.clone())
        return torch.where(torch.arange(len(row)) == token, row, -torch.inf)


@pytest.mark.parametrize("custom", [ForceToken, "tests.test_peer_processors:ForceToken"], ids=["class", "name"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processor_of_another_package_forces_its_token_for_its_requests_alone(custom, temperature):
    rows = [{"temperature": temperature, "seed": i, "extra_args": {"force": 128} if i % 2 else None} for i in range(20)]
    batch, plain = batch_of(rows, custom=[custom]), batch_of(rows)
    for seed in range(3):
        logits = random_logits(20, seed=seed)
        tokens = draw(logits, batch)
        assert set(tokens[1::2]) == {128}
        assert tokens[::2] == draw(logits, plain)[::2]


def test_processor_of_one_request_follows_what_it_has_generated():
    rows = [{"temperature": 1.0, "seed": i, "output": [5] * i, "extra_args": {"force": 100}} for i in range(6)]
    assert draw(random_logits(6), batch_of(rows, custom=[ForceCount])) == [100, 101, 102, 103, 104, 105]


def test_processor_of_another_package_acts_after_the_bias_and_before_the_temperature():
    ForceCount.seen.clear()
    batch = batch_of([{"temperature": 2.0, "logit_bias": {7: 5.0}, "extra_args": {"force": 7}}], custom=[ForceCount])
    _, values = processed(GumbelSampler(logprobs_mode="processed_logits"), torch.ones(1, VOCAB), batch)
    (row,) = ForceCount.seen
    assert (row[7], row[8]) == (6.0, 1.0)
    assert values[0, 7] == 3.0
    assert (values > -torch.inf).sum() == 1


@pytest.mark.parametrize("kinds", [(True, False), (False,), (True,)])
def test_least_length_leaves_a_grammar_its_last_token(kinds):
    """A request with structured output keeps a stop token that is all it has; another one ends up with nothing."""
    schema = StructuredOutputsParams(json={"type": "boolean"})
    rows = [
        {"min_tokens": 10, "stop": None, "stop_token_ids": [3], "structured_outputs": schema if structured else None}
        for structured in kinds
    ]
    only_stop = torch.full((len(kinds), VOCAB), -torch.inf)
    only_stop[:, 3] = 1.0
    values = after_edits(rows, only_stop)
    assert [float(row[3]) for row in values] == [1.0 if structured else -torch.inf for structured in kinds]
    assert draw(only_stop, batch_of(rows)) == [3] * len(kinds), "a row without a token ends its request"
    only_stop[:, 4] = 2.0
    values = after_edits(rows, only_stop)
    assert (values[:, 3] == -torch.inf).all()
    assert (values[:, 4] == 2.0).all()


def thinking():
    """Return vLLM's configuration of thinking, as it is once the strings are tokens."""
    config = ReasoningConfig()
    config._reasoning_start_token_ids, config._reasoning_end_token_ids = [START], END
    config._natural_reasoning_end_token_ids = NATURAL_END
    config.initialize_token_ids(None)
    assert config.enabled
    return config


class Pair:
    """Our batch with our sampler, and vLLM's with vLLM's, with the same requests all along.

    Args:
        custom: processors of others.
    """

    def __init__(self, custom=()):
        self.sides = [
            make_batch(
                kind,
                rows=8,
                vocabulary=VOCAB,
                processors=batch_of([], custom=custom).logitsprocs,
                reasoning_config=thinking(),
            )
            for kind in (RowBatch, InputBatch)
        ]
        self.ours, self.theirs = self.sides
        self.requests = [{}, {}]

    def add(self, name, **request):
        bad_ids = request.pop("bad_ids", None)
        for batch, requests in zip(self.sides, self.requests, strict=True):
            requests[name] = make_request(name, **request)
            requests[name].sampling_params._bad_words_token_ids = bad_ids
            batch.add_request(requests[name])

    def each(self, change):
        for batch in self.sides:
            change(batch)

    def remove(self, name):
        self.each(lambda batch: batch.remove_request(name))
        for requests in self.requests:
            del requests[name]

    def settle(self):
        self.each(InputBatch.condense)
        self.each(InputBatch.refresh_metadata)

    def values(self, logits):
        """Return the step's logits before the draw, by request, the same from either side to the last bit."""
        assert self.ours.req_ids == self.theirs.req_ids
        shown = [
            processed(kind(logprobs_mode="processed_logits"), logits, batch)[1]
            for kind, batch in ((GumbelSampler, self.ours), (Sampler, self.theirs))
        ]
        assert torch.equal(*shown)
        tokens = tokens_of(GumbelSampler()(logits.clone(), self.ours.sampling_metadata))
        assert tokens == expected(shown[1], self.ours), "what is drawn without logprobs is drawn from the same"
        return dict(zip(self.ours.req_ids, shown[0], strict=True))

    def generate(self, token):
        for batch, requests in zip(self.sides, self.requests, strict=True):
            append(batch, requests, token)


KINDS = {
    "none": {},
    "min_p": {"min_p": 0.1},
    "bias": {"logit_bias": {40: 0.2, 7: -0.1}},
    "least length": {"min_tokens": 5, "stop_token_ids": [11, 12, 13]},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": -0.3, "repetition_penalty": 1.2},
    "bad words": {"bad_ids": [[21], [22, 23], [START, 24]]},
    "allowed": {"allowed_token_ids": list(range(5, 250))},
    "thinking": {"thinking_token_budget": BUDGET},
    "several": {"min_p": 0.02, "logit_bias": {22: 4.0}, "repetition_penalty": 0.8, "thinking_token_budget": 1},
    "forced": {"extra_args": {"force": 200}},
}


@pytest.mark.parametrize("custom", [(), (ForceToken,)], ids=["vLLM's own", "another package's too"])
@pytest.mark.parametrize("seed", range(3))
def test_logits_of_every_request_are_vllms_while_requests_come_move_and_go(custom, seed):
    """40 steps, at random: each kind of request, alone or in any company, in any row; and rows of no kind unchanged."""
    rng, pair, admitted, met = random.Random(seed), Pair(custom), 0, set()
    for step in range(40):
        for name in list(pair.requests[0]):
            if rng.random() < 0.15 or len(pair.requests[0][name].output_token_ids) > 20:
                pair.remove(name)
        while len(pair.requests[0]) < 8 and rng.random() < 0.6:
            kind = rng.choice(list(KINDS))
            prompt = [rng.choice([START, 22, rng.randrange(VOCAB)]) for _ in range(rng.randint(1, 9))]
            pair.add(f"{kind} {admitted}", prompt=prompt, seed=admitted, temperature=1.0, stop=STOP, **KINDS[kind])
            admitted += 1
        pair.settle()
        for _ in range(rng.randrange(3) if pair.ours.num_reqs > 1 else 0):
            rows = rng.sample(range(pair.ours.num_reqs), 2)
            pair.each(lambda batch, rows=rows: batch.swap_states(*rows))
        pair.each(InputBatch.refresh_metadata)
        if not pair.requests[0]:
            continue
        logits = random_logits(pair.ours.num_reqs, VOCAB, seed=1000 * seed + step)
        for name, given, values in zip(pair.ours.req_ids, logits, pair.values(logits).values(), strict=True):
            kind = name.rsplit(" ", 1)[0]
            met.add((kind, bool(torch.equal(values, given))))
            assert kind != "none" or torch.equal(values, given)
        pair.generate(rng.choice([START, 22, NATURAL_END[0], rng.randrange(VOCAB)]))
    changing = set(KINDS) - {"none"} - (set() if custom else {"forced"})
    assert met >= {(kind, False) for kind in changing} | {("none", True)}


def test_thinking_budget_forces_its_end_token_by_token_and_again_in_the_next_block():
    """Free before; the whole end once the budget is spent; nothing after an end that the model wrote itself."""
    pair = Pair()
    pair.add("budget", prompt=[1], temperature=1.0, thinking_token_budget=BUDGET)
    pair.add("none", prompt=[1], temperature=1.0)
    logits = torch.arange(2.0 * VOCAB).reshape(2, VOCAB).div(100)
    forced = []
    for token in [START, 10, 11, 12, *END, 50, 51, START, 13, 14, 15, *END, 52, START, 16, *END, 17, 18, 19]:
        pair.generate(token)
        pair.settle()
        values = pair.values(logits)
        assert torch.equal(values["none"], logits[1])
        changed = torch.nonzero(values["budget"] > 1e8).flatten().tolist()
        forced += changed
        if not changed:
            assert torch.equal(values["budget"], logits[0])
    assert forced == [*END, *END]


def test_thinking_budget_goes_with_its_request_when_rows_are_swapped():
    pair = Pair()
    for name, budget in (("one", 1), ("none", None), ("five", 5)):
        pair.add(name, prompt=[START, 10, 11], temperature=1.0, thinking_token_budget=budget)
    pair.settle()
    for rows in ((0, 1), (1, 2), (0, 2), (0, 1)):
        pair.each(lambda batch, rows=rows: batch.swap_states(*rows))
        pair.each(InputBatch.refresh_metadata)
        values = pair.values(torch.zeros(3, VOCAB))
        assert {name for name, row in values.items() if row.any()} == {"one"}
