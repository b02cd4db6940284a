"""All pairs of keys, at several values and temperatures: refused by name, or drawn as the plain definition draws.

The accepted ones go through vLLM's real batch and our sampler together; the definition is `naive_keys.py`, and for
requests that vLLM's own sampler draws it is that sampler, in vLLM's own batch.
"""

from itertools import combinations, product

import pytest
import torch
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import InputBatch

from tests import naive_keys
from tests.naive import Parameters
from tests.processors import HalveTempered
from tests.test_rows import make_batch, make_request
from tests.test_v1_sampler import batch_of, random_logits, tokens_of
from vllm_gumbel.integration.v1 import GumbelSampler
from vllm_gumbel.params import CONTRADICTIONS, GumbelParams, ParamsError

VOCABULARY = 64
PROMPT = (1, 2, 3)
#: Ends in four copies of a piece, with one of its tokens more.
OUTPUT = (9, 5, 6, 5, 6, 5, 6, 5, 6, 5)

#: Values of every key: all kinds of effect, and values that change nothing.
VALUES = {
    "gumbel_sampler": ["gumbel", "default"],
    "gumbel_rollout_key": ["user 7", 7],
    "gumbel_salt": [0, 5, -1],
    "gumbel_preset": ["creative", "factual"],
    "gumbel_temperature_rule": ["none", "log_vocab"],
    "gumbel_hybrid_steps": [0, 10, 11],
    "gumbel_top_n": [1, 7, 1000],
    "gumbel_tail_boost": [0, 0.5],
    "gumbel_repetition_offset": [0, 1.25],
    "gumbel_noise_scale": [0, 0.5, 1],
    "gumbel_return_info": [False, True],
}

#: Rows of a step; vLLM's processors have room for 128.
STEP = 100

#: What stands beside the keys.
BESIDE = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.75, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01},
]

PAIRS = [
    ({first: a, second: b}, beside)
    for first, second in combinations(VALUES, 2)
    for a, b in product(VALUES[first], VALUES[second])
    for beside in BESIDE
]


def refused_key(keys, temperature):
    """Return the key for which the rules in words refuse a request, None if they do not."""
    get = keys.get
    noisy = {
        "gumbel_salt": "gumbel_salt" in keys,
        "gumbel_hybrid_steps": get("gumbel_hybrid_steps", 0) > 0,
        "gumbel_tail_boost": get("gumbel_tail_boost", 0) > 0,
        "gumbel_noise_scale": get("gumbel_noise_scale", 1) < 1,
        "gumbel_return_info": get("gumbel_return_info", False),
    }
    if get("gumbel_sampler") == "default":
        for key, used in noisy.items():
            if used:
                return key
    if "gumbel_preset" in keys and temperature != 1:
        return "gumbel_preset"
    if temperature == 0:
        for key in ("gumbel_hybrid_steps", "gumbel_tail_boost"):
            if noisy[key]:
                return key
        if 0 < get("gumbel_noise_scale", 1) < 1:
            return "gumbel_noise_scale"
    return None


def accepted():
    """Return the pairs that are accepted, with what stands beside them."""
    return [(keys, beside) for keys, beside in PAIRS if refused_key(keys, beside["temperature"]) is None]


@pytest.fixture(scope="module", autouse=True)
def stock_kernels():
    """Stock's own draw needs what a worker loads."""
    current_platform.import_kernels()


def test_every_pair_of_keys_is_there():
    assert list(VALUES) == list(GumbelParams.model_fields)
    assert len({frozenset(keys) for keys, _ in PAIRS}) == 55
    assert len(PAIRS) > 1_000


def test_a_pair_is_refused_exactly_where_the_rules_in_words_say_so():
    """The refusal names both sides and the value; each rule of the table refuses something here."""
    used = set()
    for keys, beside in PAIRS:
        params = SamplingParams(**beside, extra_args=keys)
        expected = refused_key(keys, beside["temperature"])
        if expected is None:
            GumbelSampler.validate_params(params)
            continue
        with pytest.raises(ParamsError) as refused:
            GumbelSampler.validate_params(params)
        (rule,) = (
            r for r in CONTRADICTIONS if str(refused.value).startswith(f"{r.key} contradicts {r.other}: {r.reason}")
        )
        assert refused.value.key == rule.key == expected
        assert str(refused.value).endswith(f"got {keys[expected]!r}")
        used.add(rule)
    assert used == set(CONTRADICTIONS)


def logits_of(rows, seed, dtype=torch.float32):
    """Return logits whose best id is often the one that would continue the loop."""
    logits = random_logits(rows, VOCABULARY, seed, dtype)
    logits[:, 6] += 4
    return logits


def row_parameters(beside, seed):
    position = len(PROMPT) + len(OUTPUT) - 1
    return Parameters(**beside, seed=seed, position=position)


def expected_tokens(logits, requests):
    """Return the tokens of the definitions, row by row."""
    tokens, stock = [], Stock()
    for row, (keys, beside), seed in zip(logits.float().tolist(), requests, range(len(requests)), strict=True):
        parameters = row_parameters(beside, seed)
        if keys.get("gumbel_sampler") == "default":
            settled = naive_keys.parameters(parameters, keys, VOCABULARY)
            edited = naive_keys.edited(row, settled, keys, OUTPUT)
            tokens.append(stock.draw(edited, settled))
        else:
            tokens.append(naive_keys.draw(row, parameters, keys, OUTPUT))
    return tokens


class Stock:
    """vLLM's own batch and sampler, for a row at a time."""

    def __init__(self):
        self.batch = make_batch(InputBatch, rows=1, vocabulary=VOCABULARY, processors=batch_of([]).logitsprocs)

    def draw(self, logits, row):
        """Return the token of a seeded row."""
        sampling = {"temperature": row.temperature, "top_k": row.top_k, "top_p": row.top_p, "min_p": row.min_p}
        generator = torch.Generator().manual_seed(row.seed)
        request = make_request("a", prompt=PROMPT, output=OUTPUT, generator=generator, seed=row.seed)
        for name, value in sampling.items():
            setattr(request.sampling_params, name, value)  # some temperatures are too high for a client to ask for
        self.batch.add_request(request)
        self.batch.refresh_metadata()
        (token,) = tokens_of(Sampler()(torch.tensor([logits]), self.batch.sampling_metadata))
        self.batch.remove_request("a")
        self.batch.condense()
        self.batch.refresh_metadata()
        return token


def request_of(keys, beside, seed):
    generator = torch.Generator().manual_seed(seed)
    return {**beside, "prompt": PROMPT, "output": OUTPUT, "seed": seed, "generator": generator, "extra_args": keys}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", ["most rows edited", "few rows edited", "processor of others", "processed logits"])
def test_accepted_pairs_draw_as_the_plain_definition(path, dtype):
    """Whatever way a step takes through the sampler; rows that set nothing, between them, are drawn as ever."""
    requests = accepted()
    if path == "few rows edited":
        requests = [each for pair in requests[::5] for each in (({}, BESIDE[0]), ({}, BESIDE[3]), pair)]
    custom = [HalveTempered] if path == "processor of others" else []
    sampler = GumbelSampler(logprobs_mode="processed_logits" if path == "processed logits" else "raw_logprobs")
    logits = logits_of(len(requests), 5, dtype)
    drawn = []
    for start in range(0, len(requests), STEP):
        part = list(enumerate(requests))[start : start + STEP]
        batch = batch_of([request_of(*each, seed) for seed, each in part], VOCABULARY, custom)
        if path == "processed logits":
            batch.sampling_metadata.max_num_logprobs = 2
        drawn += tokens_of(sampler(logits[start : start + STEP].clone(), batch.sampling_metadata))
    assert drawn == expected_tokens(logits, requests)
    assert len(set(drawn)) > 30


def test_definition_differs_from_the_plain_draw_wherever_a_key_acts():
    """So that the test above says something: each key alone changes tokens, but those that are said not to."""
    logits = logits_of(200, 6)
    plain = expected_tokens(logits, [({}, BESIDE[0])] * 200)
    changes = {
        key: sum(a != b for a, b in zip(plain, expected_tokens(logits, [({key: value}, BESIDE[0])] * 200), strict=True))
        for key, value in [(key, values[1]) for key, values in VALUES.items()]
        if key != "gumbel_hybrid_steps"
    }
    changes["gumbel_hybrid_steps"] = sum(
        a != b
        for a, b in zip(plain, expected_tokens(logits, [({"gumbel_hybrid_steps": 11}, BESIDE[0])] * 200), strict=True)
    )
    assert changes.pop("gumbel_return_info") == changes.pop("gumbel_rollout_key") == 0
    assert min(changes.values()) >= 5, changes


def test_request_in_flight_is_not_changed_by_anothers_keys():
    """Rows that are swapped, freed and taken by requests with other keys: every request draws as if it were alone."""
    keyed = [({"gumbel_tail_boost": 0.5, "gumbel_salt": 3}, BESIDE[0]), ({"gumbel_noise_scale": 0.25}, BESIDE[3])]
    keyed += [
        ({"gumbel_sampler": "default"}, BESIDE[2]),
        ({"gumbel_repetition_offset": 5, "gumbel_top_n": 9}, BESIDE[1]),
    ]
    requests = {f"plain {i}": ({}, BESIDE[0]) for i in range(4)} | {f"keyed {i}": each for i, each in enumerate(keyed)}
    seeds = {name: seed for seed, name in enumerate(requests)}
    states = {name: make_request(name, **request_of(*each, seeds[name])) for name, each in requests.items()}
    batch = make_batch(rows=6, vocabulary=VOCABULARY, processors=batch_of([]).logitsprocs)
    logits = logits_of(len(requests), 8)
    sampler = GumbelSampler()

    def verify():
        batch.refresh_metadata()
        order = [seeds[name] for name in batch.req_ids]
        given = logits[order]
        for name in batch.req_ids:  # vLLM's generator moves on with every draw
            if getattr(states[name], "gumbel_generator", None) is not None:
                states[name].gumbel_generator.manual_seed(seeds[name])
        drawn = tokens_of(sampler(given.clone(), batch.sampling_metadata))
        alone = expected_tokens(logits, list(requests.values()))
        assert drawn == [alone[i] for i in order]

    for name in ("plain 0", "keyed 0", "keyed 2", "plain 1", "keyed 1"):
        batch.add_request(states[name])
    verify()
    for gone, come in (("keyed 0", "plain 2"), ("plain 0", "keyed 3"), ("keyed 2", "plain 3"), ("keyed 3", "keyed 0")):
        batch.remove_request(gone)
        batch.add_request(states[come])
        batch.condense()
        verify()
        batch.swap_states(0, batch.num_reqs - 1)
        verify()
    for name in list(batch.req_ids):
        batch.remove_request(name)
    batch.condense()
    batch.add_request(states["plain 0"])
    verify()
