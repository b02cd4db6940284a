"""Tokens follow the filtered softmax: chi-square of draws at V = 1,000, and at V = 49,152 on a model's own logits.

The reference needs milliseconds for a row of 49,152, so most races here are evaluated for many rows at once by
`winners`, from the library's noise and the library's kept set; samples of the same rows go through `draw` and must
agree token for token. The law they are compared with comes from `naive.py`.
"""

from functools import cache

import numpy as np
import pytest

from tests import naive
from tests.rows import bfloat16
from tests.statistics import assert_goodness_of_fit
from vllm_gumbel.kernels import noise_reference as noise
from vllm_gumbel.kernels import sample_reference
from vllm_gumbel.kernels.contract import RowParams

PROMPT = "The capital of France is a city that"

SETTINGS = {
    "temperature": {"temperature": 0.8},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.02},
    "combination": {"temperature": 1.3, "top_k": 200, "top_p": 0.9, "min_p": 0.001},
}
AXES = ["seed", "position"]


def rows_along(axis, draws, settings):
    """Return parameters of many draws of one row: over seeds at one position, or over positions of one seed."""
    params = RowParams.uniform(draws, **settings, seed=2026, position=3)
    getattr(params, axis)[:] = np.arange(draws)
    return params


def winners(logits, params):
    """Return the tokens that `draw` gives for one row of logits under parameters that differ in seed and position only.

    A race is won by the smallest E / weight, weight = exp(x - max x). With v between h / 2^16 and (h + 1) / 2^16 for
    the upper word h, E lies between -ln(1 - h / 2^16) and -ln(1 - (h + 1) / 2^16). The least upper end bounds the
    winner's E / weight from above, and an id whose lower end is past that bound has lost; the few others are given
    their whole word. The bound is taken twice: over the 64 heaviest ids, the largest of a few rows serving all of them,
    then over what that leaves in each row.
    """
    x = sample_reference.scale(logits, params.temperature[0])
    keep = sample_reference.kept(x, params.top_k[0], params.top_p[0], params.min_p[0])
    ids = np.flatnonzero(keep)
    weight = np.exp(x[ids].astype(np.float64) - x[ids].max())
    heavy = np.argsort(-weight, kind="stable")[:64]
    with np.errstate(divide="ignore"):
        ends = -np.log1p(-np.arange(65_537) * 2.0**-16)
    narrow = ids.astype(np.int32)
    k0, k1, k2 = noise.row_keys(params.seed, params.position)
    tokens = np.empty(len(params.seed), np.int64)
    step = max(1, 2**18 // len(ids))
    for start in range(0, len(tokens), step):
        rows = np.arange(start, min(start + step, len(tokens)))
        h = noise.upper_words(k0[rows, None], k1[rows, None], narrow[None])
        bound = (ends[h[:, heavy] + np.int32(1)] / weight[heavy]).min(1).max()
        # -expm1(-E) inverts -ln(1 - v); one more than its floor covers rounding
        highest = np.minimum(np.floor(-np.expm1(-bound * weight) * 2.0**16) + 1, 65_535).astype(np.uint16)
        row, column = np.nonzero(h <= highest)
        first = np.searchsorted(row, np.arange(len(rows)))  # of every row: `row` is sorted
        upper = h[row, column]
        bounds = np.minimum.reduceat(ends[upper + np.int32(1)] / weight[column], first)
        left = ends[upper] / weight[column] * (1 - 1e-12) <= bounds[row]
        row, column, upper = row[left], column[left], upper[left]
        words = upper.astype(np.uint64) << np.uint64(48) | noise.lower_words(k2[rows[row]], ids[column])
        score = x[ids[column]].astype(np.float64) - np.log(noise.exponential(words))
        first = np.searchsorted(row, np.arange(len(rows)))
        best = np.flatnonzero(score == np.maximum.reduceat(score, first)[row])
        tokens[rows] = ids[column[best[np.unique(row[best], return_index=True)[1]]]]
    return tokens


def law(logits, settings):
    """Return the probability of every id, from the kept set of the second implementation."""
    row = naive.Parameters(**settings)
    x = naive.tempered(logits.tolist(), row.temperature)
    kept = naive.kept(x, row)
    probabilities = np.zeros(len(x))
    probabilities[kept] = np.exp(np.array(x)[kept] - max(x))
    return probabilities / probabilities.sum()


def assert_follows_law(logits, settings, axis, *, draws, drawn_too):
    """Assert the chi-square of `draws` winners, and that `draw` gives the same for `drawn_too` of them."""
    params = rows_along(axis, draws, settings)
    tokens = winners(logits, params)
    some = np.linspace(0, draws - 1, drawn_too).astype(np.int64)
    same = RowParams(**{name: values[some] for name, values in vars(params).items()})
    assert (sample_reference.draw(np.broadcast_to(logits, (drawn_too, len(logits))), same).tokens == tokens[some]).all()
    counts = np.bincount(tokens, minlength=len(logits))
    assert_goodness_of_fit(observed=counts, probabilities=law(logits, settings), claim=f"{settings} over {axis}s")


@cache
def synthetic():
    """Return 1,000 logits, half of them tied with another one."""
    return bfloat16(np.random.default_rng(1000).normal(0, 2, 1000))


@pytest.fixture(scope="module")
def real(model_path):
    """Return the model's logits after the prompt, as they reach a sampler: bfloat16, widened to float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    ids = transformers.AutoTokenizer.from_pretrained(model_path)(PROMPT, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, -1].float().numpy()
    assert logits.shape == (49_152,)
    return logits


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_draws_of_a_thousand_ids_follow_the_filtered_softmax(setting, axis):
    """200,000 draws at V = 1,000.

    False alarm 1e-6. Caught with power 0.99: a root mean square relative error of 0.041, total variation half of it;
    with filters 0.036 (top-p) to 0.024 (top-k).
    """
    assert_follows_law(synthetic(), SETTINGS[setting], axis, draws=200_000, drawn_too=200)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_draws_on_real_logits_follow_the_filtered_softmax(real, setting, axis):
    """V = 49,152: 8,000 draws without a filter, 40,000 with one.

    False alarm 1e-6. Caught with power 0.99: a root mean square relative error of 0.15 over 132 groups of ids
    without a filter, of 0.05 to 0.075 over the kept ids with one; total variation half of it.
    """
    draws = 8_000 if setting == "temperature" else 40_000
    assert_follows_law(real, SETTINGS[setting], axis, draws=draws, drawn_too=20)


def test_draw_itself_follows_the_law():
    """10,000 rows with all filters through `draw`, at seeds and positions that change together.

    False alarm 1e-6. Caught with power 0.99: a root mean square relative error of 0.13.
    """
    settings = SETTINGS["combination"]
    params = rows_along("seed", 10_000, settings)
    params.position[:] = np.arange(10_000) % 97
    tokens = sample_reference.draw(np.broadcast_to(synthetic(), (10_000, 1000)), params).tokens
    counts = np.bincount(tokens, minlength=1000)
    assert_goodness_of_fit(observed=counts, probabilities=law(synthetic(), settings), claim="tokens of draw")


@pytest.mark.parametrize("axis", AXES)
def test_tokens_of_neighbouring_draws_are_independent(axis):
    """100,000 pairs of tokens one and two seeds or positions apart, in 8 groups of ids.

    False alarm 1e-6. Caught with power 0.99: a root mean square relative error of 0.036 over 64 cells.
    """
    tokens = winners(synthetic(), rows_along(axis, 100_000, {"temperature": 1.0}))
    group = np.arange(1000) % 8
    p = np.bincount(group, weights=law(synthetic(), {"temperature": 1.0}))
    for distance in (1, 2):
        pairs = group[tokens[:-distance]] * 8 + group[tokens[distance:]]
        counts = np.bincount(pairs, minlength=64)
        claim = f"pairs of tokens {distance} {axis}s apart"
        assert_goodness_of_fit(observed=counts, probabilities=np.outer(p, p).ravel(), claim=claim)
