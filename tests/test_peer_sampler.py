"""What vLLM's tests of its sampler demand of logits before the draw, and of the draw itself, demanded of ours.

`after_edits` first holds vLLM's sampler, ours in its place, and our way without a copy of the batch to equal values, to
the last bit; so what a test then claims, it claims of all three.
"""

import numpy as np
import pytest
import torch
from vllm.v1.sample.sampler import Sampler

from tests.test_v1_sampler import batch_of, draw, processed, random_logits, tokens_of
from tests.test_v1_sampler import stock_kernels as stock_kernels  # a fixture of this module too
from vllm_gumbel.integration.edits import edit
from vllm_gumbel.integration.v1 import GumbelSampler

VOCAB, LEVEL = 1024, 0.01
FLOAT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]

rows_of_batch = pytest.mark.parametrize("rows", [1, 2, 32])


def after_edits(parameters, logits=None):
    """Return float32 [rows, vocab]: logits, level ones if none are given, after all that comes before the draw."""
    logits = torch.full((len(parameters), VOCAB), LEVEL) if logits is None else logits
    batch = batch_of(parameters, logits.shape[1])
    metadata, rows = batch.sampling_metadata, np.arange(len(parameters))
    stock = processed(Sampler(logprobs_mode="processed_logits"), logits, batch)[1]
    assert torch.equal(processed(GumbelSampler(logprobs_mode="processed_logits"), logits, batch)[1], stock)
    in_place = logits.to(torch.float32, copy=True)
    edit(in_place, rows, None, metadata, metadata.rows, metadata.rows.params())
    assert torch.equal(in_place, stock)
    return stock


def histories(rows, seed=0):
    """Return one request a row, with a random prompt and 20 random tokens of output."""
    rng = np.random.default_rng(seed)
    return [
        {"prompt": rng.integers(0, VOCAB, rng.integers(1, 64)).tolist(), "output": rng.integers(0, VOCAB, 20).tolist()}
        for _ in range(rows)
    ]


def ids(mask):
    """Return where a row of booleans is true."""
    return set(torch.nonzero(mask).flatten().tolist())


@rows_of_batch
@pytest.mark.parametrize("penalty", [-2.0, 2.0])
def test_presence_penalty_moves_generated_ids_and_no_others(rows, penalty):
    requests = histories(rows)
    values = after_edits([{**each, "presence_penalty": penalty} for each in requests])
    for row, each in zip(values, requests, strict=True):
        assert ids(row != row.new_tensor(LEVEL)) == set(each["output"])
        best, worst = int(row.argmax()), int(row.argmin())
        assert (worst in each["output"], best in each["output"]) == (penalty > 0, penalty < 0)


@rows_of_batch
@pytest.mark.parametrize("penalty", [-2.0, 2.0])
def test_frequency_penalty_grows_with_the_count(rows, penalty):
    rng = np.random.default_rng(1)
    distinct = [rng.choice(VOCAB, rng.integers(1, 10), replace=False).tolist() for _ in range(rows)]
    outputs = [[token for n, token in enumerate(each, 1) for _ in range(n)] for each in distinct]
    values = after_edits([{"output": output, "frequency_penalty": penalty} for output in outputs])
    for row, each in zip(values, distinct, strict=True):
        expected = LEVEL - penalty * np.arange(1, len(each) + 1)
        assert row[each].tolist() == pytest.approx(expected.tolist(), rel=1e-6)
        assert ids(row != row.new_tensor(LEVEL)) == set(each)
        assert int(row.argmin() if penalty > 0 else row.argmax()) == each[-1], "the most frequent moves most"


@rows_of_batch
@pytest.mark.parametrize("penalty", [0.1, 1.9])
def test_repetition_penalty_scales_ids_of_prompt_and_output(rows, penalty):
    """Towards zero where the logit is positive, away from it where it is negative."""
    requests = histories(rows, seed=2)
    for level in (LEVEL, -LEVEL):
        values = after_edits(
            [{**each, "repetition_penalty": penalty} for each in requests], torch.full((rows, VOCAB), level)
        )
        factor = 1 / penalty if level > 0 else penalty
        for row, each in zip(values, requests, strict=True):
            seen = set(each["prompt"]) | set(each["output"])
            assert ids(row != row.new_tensor(level)) == seen
            assert row[sorted(seen)].tolist() == pytest.approx([level * factor] * len(seen), rel=1e-6)
            assert (int(row.argmin()) in seen, int(row.argmax()) in seen) == (penalty > 1, penalty < 1)


@rows_of_batch
@pytest.mark.parametrize("bias", [-0.1, 1.2])
def test_logit_bias_is_added_to_the_ids_it_names(rows, bias):
    values = after_edits([{"logit_bias": {i: bias, VOCAB - 1 - i: 2 * bias}} for i in range(rows)])
    expected = torch.full((rows, VOCAB), LEVEL)
    for i in range(rows):
        expected[i, i] += bias
        expected[i, VOCAB - 1 - i] += 2 * bias
    assert torch.allclose(values, expected, rtol=1e-6, atol=0)


@rows_of_batch
@pytest.mark.parametrize("allowed", [1, 2, VOCAB])
def test_only_allowed_ids_are_left_and_rows_without_a_list_keep_all(rows, allowed):
    lists = [None if i % 2 else sorted((i + k) % VOCAB for k in range(allowed)) for i in range(rows)]
    values = after_edits([{"allowed_token_ids": each} for each in lists])
    for row, each in zip(values, lists, strict=True):
        assert ids(row > -torch.inf) == (set(range(VOCAB)) if each is None else set(each))
    assert set(values[values > -torch.inf].tolist()) == {float(torch.tensor(LEVEL))}
    tokens = draw(torch.full((rows, VOCAB), LEVEL), batch_of([{"allowed_token_ids": each} for each in lists], VOCAB))
    assert all(each is None or token in each for token, each in zip(tokens, lists, strict=True))


@rows_of_batch
@pytest.mark.parametrize("lengths", [(1,), (1, 3), (2, 2)])
def test_last_id_of_a_bad_word_is_masked_exactly_after_its_beginning(rows, lengths):
    rng = np.random.default_rng(3)
    requests, masked = [], []
    for i, history in enumerate(histories(rows, seed=3)):
        words = [rng.integers(0, VOCAB, length).tolist() for length in lengths]
        output, expected = history["output"], {word[0] for word in words if len(word) == 1}
        if i % 3 < 2 and len(words[-1]) > 1:
            begin = words[-1][:-1] if i % 3 == 0 else [(token + 1) % VOCAB for token in words[-1][:-1]]
            output = [*output[: -len(begin)], *begin]
        expected |= {word[-1] for word in words if len(word) > 1 and output[-len(word) + 1 :] == word[:-1]}
        requests.append({**history, "output": output, "bad_ids": words if i != 4 else None})
        masked.append(expected if i != 4 else set())
    for row, expected in zip(after_edits(requests), masked, strict=True):
        assert ids(row == -torch.inf) == expected
    assert rows < 32 or any(masked), "the case is one: some words are completed"


@rows_of_batch
def test_stop_ids_are_masked_until_the_least_length_is_reached(rows):
    rng = np.random.default_rng(4)
    requests = [
        {"min_tokens": 5, "stop": None, "output": [1] * (5 * (i % 3)), "stop_token_ids": rng.integers(0, VOCAB, 40)}
        for i in range(rows)
    ]
    for each in requests:
        each["stop_token_ids"] = each["stop_token_ids"].tolist()
    for row, each in zip(after_edits(requests), requests, strict=True):
        assert ids(row == -torch.inf) == (set() if each["output"] else set(each["stop_token_ids"]))


def test_edits_act_in_vllms_order():
    """Masks, bias, then penalties: a bias is scaled, and a masked id stays masked whatever is added."""
    (values,) = after_edits(
        [
            {
                "prompt": [5],
                "output": [5, 6],
                "logit_bias": {5: 2.0, 7: 50.0, 8: 1.0},
                "repetition_penalty": 2.0,
                "frequency_penalty": 0.5,
                "presence_penalty": 0.25,
                "bad_ids": [[7]],
            }
        ],
        torch.ones(1, VOCAB),
    )
    assert values[[4, 5, 6, 7, 8]].tolist() == [1.0, 3 / 2 - 0.75, 0.5 - 0.75, -torch.inf, 2.0]


def test_every_parameter_at_once_on_random_rows():
    """Equal to the last bit, whatever is asked together."""
    every = {
        "temperature": 1.0,
        "presence_penalty": 1.2,
        "frequency_penalty": 1.2,
        "repetition_penalty": 1.2,
        "logit_bias": {3: 2.0, 900: -1.0},
        "min_tokens": 15,
        "stop_token_ids": [3, 4, 5],
        "bad_ids": [[17], [18, 19]],
        "allowed_token_ids": list(range(800)),
    }
    names = [name for name in every if name != "temperature"]
    for part in (0, 1):  # a batch of vLLM's has 128 rows
        requests = [
            {**each, **{name: every[name] for k, name in enumerate(names) if (128 * part + i) >> k & 1}}
            for i, each in enumerate(histories(128, seed=part))
        ]
        logits = random_logits(128, VOCAB, seed=part, dtype=torch.bfloat16)
        after_edits(requests, logits)
        limited = [{**each, "min_p": 0.5, "top_p": 0.5, "top_k": 3, "temperature": 1.2} for each in requests]
        for asked in (requests, limited):
            assert all(0 <= token < VOCAB for token in draw(logits, batch_of(asked, VOCAB)))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_top_k_of_one_is_greedy_even_among_ties(dtype):
    """vllm#5404: in a batch with greedy rows and rows without a limit, with top_p and without, at any temperature."""
    row = torch.tensor([1.0, 1.0, 0.5, 0.0, -1.0, -2.0, *[-3.0] * 26], dtype=dtype)
    for top_p in (1.0, 0.5, 0.99):
        for temperature in (0.1, 0.7, 2.0):
            one = [{"temperature": temperature, "top_k": 1, "top_p": top_p, "seed": i} for i in range(32)]
            free = [{"temperature": temperature, "seed": i} for i in range(32)]
            tokens = draw(row.repeat(65, 1), batch_of([*one, *free, {"temperature": 0}], 32))
            assert set(tokens[:32]) == {tokens[-1]} == {0}
            assert {0, 1} <= set(tokens[32:64]), "the tie is one: without the limit both are drawn"


def test_top_k_above_one_still_draws():
    row = torch.tensor([3.0, 2.5, 2.0, 1.5, 1.0, 0.5, *[-3.0] * 26])
    tokens = draw(row.repeat(64, 1), batch_of([{"temperature": 1.0, "top_k": 3, "seed": i} for i in range(64)], 32))
    assert set(tokens) == {0, 1, 2}


def test_seed_repeats_and_another_seed_differs():
    logits = random_logits(1, VOCAB).repeat(20, 1).div(3)
    first, again, other = (
        draw(logits, batch_of([{"temperature": 1.0, "seed": seed, "output": [1] * i} for i in range(20)], VOCAB))
        for seed in (42, 42, 43)
    )
    assert first == again != other
    assert len(set(first)) > 15, "a seed gives other noise at every position"


def test_greedy_is_the_argmax_of_many_large_rows():
    logits = random_logits(16, 200_000)
    batch = batch_of([{"temperature": 0.0, "seed": i} for i in range(16)], 200_000)
    assert draw(logits, batch) == logits.argmax(-1).tolist()


def test_wish_for_noise_in_float64_reaches_vllms_sampler_and_changes_nothing_here():
    """Our scores are compared in float64 anyway."""
    precise = GumbelSampler(use_fp64_gumbel=True)
    assert precise.stock.topk_topp_sampler.use_fp64_gumbel
    assert precise._stock_rows.topk_topp_sampler.use_fp64_gumbel
    logits, batch = random_logits(40), batch_of([{"temperature": 1.0, "seed": i} for i in range(40)])
    assert tokens_of(precise(logits.clone(), batch.sampling_metadata)) == draw(logits, batch)
