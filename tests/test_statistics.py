"""Row statistics: the reference against numbers by hand and against plain Python; what live draws make of them."""

import math
from dataclasses import fields

import numpy as np
import pytest

from tests import naive
from tests.rows import INFINITY, NAN, random_params
from tests.statistics import assert_uniform, smallest_relative_error
from tests.test_numba_equality import as_dtype, make_rows
from vllm_gumbel.kernels import sample_numba
from vllm_gumbel.kernels import statistics_numba as ours
from vllm_gumbel.kernels import statistics_reference as reference
from vllm_gumbel.kernels.contract import NO_TOKEN, RowParams, Stream
from vllm_gumbel.kernels.statistics import RowStatistics

NAMES = [field.name for field in fields(RowStatistics)]


def one_row(logits, token, *, usable=None, below=1e-6, **params):
    """Return the reference's statistics of one row as numbers by name."""
    row = np.asarray(logits, np.float32)[None]
    found = reference.statistics(
        row,
        RowParams.uniform(1, **params),
        np.array([token]),
        np.array([0]),
        usable_vocab=usable,
        improbable_below=below,
    )
    return {name: getattr(found, name)[0] for name in NAMES}


def mixed_batch(rng, rows, vocabulary, dtype, usable, stream):
    """Return logits of every kind, parameters, and tokens, of which four in five are those that are drawn."""
    logits, params = as_dtype(make_rows(rng, rows, vocabulary), dtype), random_params(rng, rows, vocabulary)
    tokens = sample_numba.draw(logits, params, usable_vocab=usable, stream=stream).tokens
    other = rng.random(rows) < 0.2
    tokens[other] = rng.integers(-1, vocabulary + 2, np.count_nonzero(other))
    return logits, params, tokens


# --- the definition ----------------------------------------------------------------------------------------------


def test_two_ids_by_hand():
    """Odds of 1 to 3."""
    found = one_row([0, math.log(3)], 0, below=0.3)
    assert found["kept"] == 2
    assert found["log_total"] == pytest.approx(math.log(4), abs=1e-6)
    assert found["surprisal"] == pytest.approx(math.log(4), abs=1e-6)
    assert found["entropy"] == pytest.approx(math.log(4) - 0.75 * math.log(3), abs=1e-6)
    assert found["variance"] == pytest.approx(3 / 16 * math.log(3) ** 2, abs=1e-6)
    assert found["log_probability"] == pytest.approx(-math.log(4), abs=1e-6)
    assert found["improbable_mass"] == pytest.approx(0.25, abs=1e-6)
    g = naive.gumbel(naive.word(7, 9, 0))
    assert one_row([0, math.log(3)], 0, seed=7, position=9)["score"] == pytest.approx(g - math.log(4), abs=1e-6)


def test_temperature_and_top_k_by_hand():
    """Odds 1 to 2 to 4 are 1 to 4 to 16 at temperature 1/2; the probability at temperature 1 knows of no filter."""
    found = one_row(np.log([1, 2, 4]), 1, temperature=0.5, top_k=2, below=0.2)
    assert found["kept"] == 2
    assert found["log_total"] == pytest.approx(math.log(20), abs=1e-6)
    assert found["surprisal"] == pytest.approx(math.log(5), abs=1e-6)
    assert found["variance"] == pytest.approx(4 / 25 * math.log(4) ** 2, abs=1e-6)
    assert found["log_probability"] == pytest.approx(math.log(2 / 7), abs=1e-6)
    assert found["improbable_mass"] == 0, "the one improbable id is not kept"
    assert one_row(np.log([1, 2, 4]), 1, temperature=0.5, top_k=2, below=0.3)["improbable_mass"] == pytest.approx(0.2)


def test_token_that_the_filters_leave_out_by_hand():
    """Odds 8 to 4 to 2 to 1: the first two have 12 / 15."""
    for token in (3, NO_TOKEN, 4):
        found = one_row(np.log([8, 4, 2, 1]), token, top_p=0.75)
        assert found["kept"] == 2
        assert found["surprisal"] == INFINITY
        assert found["score"] == -INFINITY
        assert found["entropy"] == pytest.approx(math.log(3) - 2 / 3 * math.log(2), abs=1e-6)
        expected = math.log(1 / 15) if token == 3 else -INFINITY
        assert found["log_probability"] == pytest.approx(expected, abs=1e-6)


def test_greedy_row_by_hand():
    """The first of the largest is certain; nothing else is possible."""
    found = one_row([1, 3, 3], 1, temperature=0)
    assert (found["kept"], found["log_total"], found["surprisal"], found["entropy"], found["variance"]) == (
        1, 3, 0, 0, 0,
    )  # fmt: skip
    assert np.isnan(found["score"])
    assert found["log_probability"] == pytest.approx(-math.log(2 + math.exp(-2)), abs=1e-6)
    assert one_row([1, 3, 3], 2, temperature=0)["surprisal"] == INFINITY
    assert [one_row([1, 3, 3], 1, temperature=0, below=below)["improbable_mass"] for below in (0.46, 0.48)] == [0, 1]


def test_padding_and_nan_have_no_mass():
    """As if the row were [0, ln 3]."""
    expected = one_row([-INFINITY, 0, math.log(3)], 2)
    assert one_row([NAN, 0, math.log(3), 50, INFINITY], 2, usable=3) == expected
    assert expected["log_probability"] == pytest.approx(math.log(3 / 4), abs=1e-6)
    assert one_row([0, 0, 9], 2, usable=2)["log_probability"] == -INFINITY


@pytest.mark.parametrize("temperature", [0, 1e-4])
@pytest.mark.parametrize("logits", [[0, INFINITY], [NAN, NAN], [-INFINITY, -INFINITY], [NAN, -INFINITY]])
def test_row_without_a_law_has_no_numbers(logits, temperature):
    """No finite candidate, or an infinity."""
    found = one_row(logits, 1, temperature=temperature)
    assert found.pop("kept") == 0
    assert all(np.isnan(value) for value in found.values())


def test_reference_is_the_definition():
    """400 rows of up to 9 ids against plain Python that shares no code with it: within 1e-9."""
    rng = np.random.default_rng(1)
    for _ in range(400):
        vocabulary, stream = int(rng.integers(1, 10)), Stream(int(rng.integers(4)))
        logits, params, tokens = mixed_batch(rng, 1, vocabulary, "float32", None, stream)
        below = float(rng.choice([1e-6, 0.1, 0.3]))
        with np.errstate(over="ignore"):
            found = reference.statistics(logits, params, tokens, np.array([0]), stream=stream, improbable_below=below)
        row = naive.Parameters(**{name: values[0].item() for name, values in vars(params).items()})
        right = by_definition(logits[0].tolist(), row, int(tokens[0]), stream, below)
        for name, value in right.items():
            np.testing.assert_allclose(getattr(found, name)[0], value, rtol=1e-9, atol=1e-9, err_msg=name)


def by_definition(logits, row, token, stream, below):
    """Return the statistics of one row of a few ids."""
    x, greedy = naive.tempered(logits, row.temperature), naive.single(row.temperature) < naive.single(1e-5)
    keep = naive.kept(x, row)
    if greedy and keep:
        keep = [x.index(max(x))]
    if not keep or math.isinf(x[keep[0]]):
        return {"kept": 0} | dict.fromkeys(NAMES[1:], NAN)
    top = max(x[i] for i in keep)
    total = math.log(math.fsum(math.exp(x[i] - top) for i in keep))
    p = {i: math.exp(x[i] - top - total) for i in keep}
    surprisals = {i: total + top - x[i] for i in keep}
    entropy = math.fsum(p[i] * surprisals[i] for i in keep)
    clean = naive.tempered(logits, 1)
    base = max(clean)
    base_total = math.log(math.fsum(math.exp(y - base) for y in clean))
    log_p = [y - base - base_total for y in clean]
    surprisal = surprisals.get(token, INFINITY)
    return {
        "kept": len(keep),
        "log_total": top + total,
        "surprisal": surprisal,
        "entropy": entropy,
        "variance": math.fsum(p[i] * (surprisals[i] - entropy) ** 2 for i in keep),
        "score": NAN
        if greedy
        else naive.gumbel(naive.word(row.seed, row.position, token, stream, row.salt)) - surprisal,
        "log_probability": log_p[token] if 0 <= token < len(log_p) else -INFINITY,
        "improbable_mass": math.fsum(p[i] for i in keep if log_p[i] < math.log(below)),
    }


# --- the law -----------------------------------------------------------------------------------------------------

DRAWS = 200_000


def evidence(*, heat=1.0, shift=0):
    """Return z of the surprisals, and the scores' distribution function, of draws from four rows under four filters.

    Args:
        heat: factor on the temperature that the tokens are drawn with.
        shift: how far tokens are moved from the row with their noise to another with the same law.
    """
    rng = np.random.default_rng(12)
    logits = as_dtype(rng.normal(0, 2, (4, 500)), "bfloat16")
    logits = np.broadcast_to(logits, (DRAWS // 4, 4, 500)).reshape(DRAWS, 500)
    params = RowParams.uniform(DRAWS, temperature=0.9, position=5)
    params.seed[:], params.top_k[1::4], params.top_p[2::4], params.min_p[3::4] = np.arange(DRAWS), 40, 0.9, 0.01
    heated = RowParams(**(vars(params) | {"temperature": params.temperature * np.float32(heat)}))
    tokens = np.roll(sample_numba.draw(logits, heated).tokens, shift)
    found = ours.statistics(logits, params, tokens, np.arange(DRAWS))
    inside = np.isfinite(found.surprisal)
    z = (found.surprisal - found.entropy)[inside].sum() / math.sqrt(found.variance[inside].sum())
    return z, np.exp(-np.exp(-found.score[inside])), found.variance.mean()


def assert_exact(z, scores):
    """Assert what live traffic asserts; each with a false-alarm rate of at most 1e-6."""
    assert abs(z) < 5, "surprisals"
    assert_uniform(values=scores, bins=20, claim="winning scores")


def test_exact_draws_pass():
    """Rate of a false alarm of z: 5.7e-7, of the scores: 1e-6.

    A temperature that is off by e moves z by e sqrt(draws * variance), so with 200,000 draws of mean variance 2.08 and
    power 0.99 the smallest error that z catches is (5 + 2.33) / sqrt(416,000) = 1.2%. The scores catch a relative error
    of 2.2% (root mean square) in the probability of their twentieths.
    """
    z, scores, variance = evidence()
    assert_exact(z, scores)
    assert 2.0 < variance < 2.2
    assert smallest_relative_error(cells=20, samples=DRAWS, two_sided=True) < 0.022


def test_temperature_five_percent_too_high_fails():
    """By its surprisals; tokens past the filters, which a higher temperature lets through, are left out of them."""
    z, scores, _ = evidence(heat=1.05)
    assert z > 15
    with pytest.raises(AssertionError, match="surprisals"):
        assert_exact(z, scores)


def test_tokens_of_the_right_law_but_other_noise_fail():
    """Tokens of other seeds have the right surprisals and the wrong scores."""
    z, scores, _ = evidence(shift=4)
    with pytest.raises(AssertionError, match="winning scores"):
        assert_exact(z, scores)
