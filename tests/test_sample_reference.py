"""Public failures of samplers, as rows for the reference draw; each docstring names its case."""

import math

import numpy as np
import pytest

from tests import naive
from tests.rows import INFINITY, NAN, bfloat16, draw_many, draw_row, take
from tests.statistics import assert_goodness_of_fit
from vllm_gumbel.kernels import noise_reference as noise
from vllm_gumbel.kernels.contract import NO_TOKEN, Flag, RowParams
from vllm_gumbel.kernels.sample_reference import draw

LARGEST_WORD = 2**64 - 1


def force_words(monkeypatch, word_of):
    """Replace the words of the noise by `word_of(tokens)`."""
    monkeypatch.setattr(
        noise, "noise_words", lambda _seed, _position, tokens, *_: np.asarray(word_of(tokens), np.uint64)
    )


# --- noise: ends of the range ------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [1, 2, 257, 163_840])
@pytest.mark.parametrize("word", [0, 2**63 - 1, 2**63, LARGEST_WORD])
def test_extreme_word_never_makes_a_masked_id_possible(monkeypatch, vocabulary, word):
    """vllm#43249: -inf plus the noise of an extreme word is no NaN, and the id is in the row and not a masked one."""
    force_words(monkeypatch, lambda tokens: np.full(np.shape(tokens), word, np.uint64))
    logits = np.full(vocabulary, -INFINITY)
    logits[vocabulary // 2 :] = 0.0
    assert draw_row(logits).token == vocabulary // 2


def test_masked_id_with_the_best_noise_stays_impossible(monkeypatch):
    """sglang#25106, #33423: the masked id gets the largest noise there is, the others the smallest."""
    force_words(monkeypatch, lambda tokens: np.where(tokens == 3, 0, LARGEST_WORD))
    assert draw_row([-1e4, -2e4, -3e4, -INFINITY]).token == 0


def test_lone_finite_logit_always_wins():
    """A lone finite logit: every other id is masked, 1,000 seeds, each id in turn."""
    logits = np.full((1000, 257), -INFINITY, np.float32)
    lone = np.arange(1000) % 257
    logits[np.arange(1000), lone] = -50.0
    params = RowParams.uniform(1000)
    params.seed[:] = np.arange(1000)
    assert (draw(logits, params).tokens == lone).all()


@pytest.mark.parametrize("value", [-3.4e38, -1e4, 0.0, 3.4e38])
def test_lone_finite_logit_wins_with_the_smallest_noise(monkeypatch, value):
    """A lone finite logit wins also when its noise is the smallest possible."""
    force_words(monkeypatch, lambda tokens: np.full(np.shape(tokens), LARGEST_WORD, np.uint64))
    assert draw_row([-INFINITY, -INFINITY, value, -INFINITY]) == (2, Flag(0), [2])


def test_scores_are_compared_in_float64(monkeypatch):
    """vllm#43150, #47524: noise that differs by 3e-13 decides; as float32 both scores are one, and id 0 would win."""
    force_words(monkeypatch, lambda tokens: np.where(tokens == 0, 2**62 + 2**20, 2**62))
    assert draw_row([0.0, 0.0]).token == 1


# --- seeds -------------------------------------------------------------------------------------------------------


def test_seeded_row_repeats_beside_unseeded_rows():
    """vllm#51226, #51206: row 0 has seed 42, row 1 a new seed in each run; T = 0.8, 16 tokens, 4 runs."""
    rng = np.random.default_rng(51226)
    steps = rng.normal(size=(16, 2, 1000)).astype(np.float32)
    runs, others = [], []
    for _ in range(4):
        params = RowParams.uniform(2, temperature=0.8, seed=42)
        params.seed[1] = rng.integers(2**63)
        tokens = np.array([draw(logits, step_at(params, i)).tokens for i, logits in enumerate(steps)])
        runs.append(tokens[:, 0].tolist())
        others.append(tokens[:, 1].tolist())
    alone = [draw_row(logits[0], temperature=0.8, seed=42, position=i).token for i, logits in enumerate(steps)]
    assert runs == [alone] * 4
    assert len({tuple(other) for other in others}) == 4


def step_at(params, position):
    """Return `params` with every row at `position`."""
    return RowParams(**(vars(params) | {"position": np.full(len(params.seed), position)}))


def test_equal_requests_draw_equal_tokens_in_any_slot():
    """tt-metal#53802, vllm#17524, #21310: equal row, parameters, seed and position in eight slots."""
    logits = np.random.default_rng(53802).normal(size=1000)
    tokens = draw_many(logits, seeds=[7] * 8, top_p=0.9, position=3)
    assert set(tokens.tolist()) == {draw_row(logits, top_p=0.9, seed=7, position=3).token}


def test_rows_with_different_seeds_draw_independently():
    """vLLM 0.33 ROCm path: equal logits in one batch, 512 seeds; one shared row of noise would make all rows equal.

    False alarm 1e-6. Caught with power 0.99: a root mean square relative error of 0.42 over 16 ids.
    """
    tokens = draw_many(np.zeros(16), seeds=range(512))
    assert_goodness_of_fit(observed=np.bincount(tokens, minlength=16), probabilities=np.ones(16), claim="rows")


@pytest.mark.parametrize("changed", ["seed", "position", "salt"])
def test_every_part_of_the_address_changes_the_draw(changed):
    """40 values of one part, the others fixed: among 20,000 equal logits hardly two draws agree.

    False alarm below 1e-6: six equal pairs or more where 0.04 are expected. Catches a part that is not used.
    """
    tokens = [
        draw_row(np.zeros(20_000), **({"seed": 1, "position": 1, "salt": 1} | {changed: i})).token for i in range(40)
    ]
    assert len(set(tokens)) >= 35


# --- temperature and ranges --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-4, 1e-5])
@pytest.mark.parametrize("rounded", [bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_tiny_temperature_equals_greedy(temperature, rounded):
    """vllm#3063, #1623: half precision logits; rows whose largest value is tied are left out, noise decides those."""
    logits = rounded(np.random.default_rng(3063).normal(0, 5, (200, 1000))).astype(np.float32)
    logits = logits[(logits == logits.max(1, keepdims=True)).sum(1) == 1]
    assert len(logits) > 100
    processed = np.empty_like(logits)
    drawn = draw(logits, RowParams.uniform(len(logits), temperature=temperature, seed=5), processed=processed)
    assert (drawn.tokens == logits.argmax(1)).all()
    assert not np.isnan(processed).any()
    assert not drawn.flags.any()


@pytest.mark.parametrize("temperature", [0.0, 9.9e-6, 1e-45, -1.0])
def test_temperature_below_the_limit_is_greedy_and_ignores_filters(temperature):
    """The largest logit wins, the lowest id of several, whatever the seed and the filters."""
    for seed in range(20):
        outcome = draw_row([1, 3, 3, 2], temperature=temperature, seed=seed, top_k=1, top_p=0.1, min_p=0.9)
        assert outcome == (1, Flag(0), [0, 1, 2, 3])


@pytest.mark.parametrize("temperature", [NAN, INFINITY, -INFINITY, 3.4e38])
def test_no_temperature_gives_an_id_outside_the_row(temperature):
    """vllm#45116, op part: such values are refused before; should one arrive, no id is outside the row or masked."""
    with np.errstate(invalid="ignore"):
        for seed in range(50):
            assert draw_row([-INFINITY, 1, 2, 3, -INFINITY], temperature=temperature, seed=seed).token in (1, 2, 3)


# --- NaN, empty rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", [0, 3, 7])
def test_nan_column_is_impossible_and_the_rest_keeps_its_law(column):
    """colibri#369: V = 8, one NaN, 4,000 seeds.

    False alarm 1e-6. Caught with power 0.99: a root mean square relative error of 0.14 over the 7 others.
    """
    logits = np.linspace(0, 2, 8)
    logits[column] = NAN
    law = np.exp(np.where(np.isnan(logits), -INFINITY, logits))
    tokens = draw_many(logits, seeds=range(4000))
    assert_goodness_of_fit(observed=np.bincount(tokens, minlength=8), probabilities=law, claim="ids beside a NaN")
    assert draw_row(logits).flags == Flag.NONFINITE


@pytest.mark.parametrize("column", [0, 3, 7])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_infinite_logit_wins(column, temperature):
    """colibri#369: +inf wins at every seed, under every filter, and is counted."""
    logits = np.zeros(8)
    logits[column] = INFINITY
    for seed in range(50):
        for filters in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}):
            outcome = draw_row(logits, temperature=temperature, seed=seed, **filters)
            assert outcome[:2] == (column, Flag.NONFINITE)


def test_lowest_of_several_infinite_logits_wins():
    """colibri#369: two +inf, with a NaN below them."""
    for seed in range(50):
        assert draw_row([0, NAN, 0, INFINITY, 0, INFINITY, 0, 0], seed=seed) == (3, Flag.NONFINITE, [3, 5])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_row_without_a_candidate_has_no_token(temperature, filters):
    """vllm#22881, colibri#369: all NaN, all -inf, or both; counted by kind, never a silent token 0."""
    for logits, kind in (
        ([NAN] * 8, Flag.NONFINITE | Flag.NO_CANDIDATE),
        ([-INFINITY] * 8, Flag.NO_CANDIDATE),
        ([NAN, -INFINITY] * 4, Flag.NONFINITE | Flag.NO_CANDIDATE),
    ):
        assert draw_row(logits, temperature=temperature, **filters) == (NO_TOKEN, kind, [])


def test_nan_row_leaves_its_neighbours_untouched():
    """flashinfer#2402, #384: a row of NaN, and one with a single NaN, between good rows."""
    logits = np.random.default_rng(2402).normal(size=(5, 1000)).astype(np.float32)
    params = RowParams.uniform(5, temperature=0.9, top_p=0.9, seed=1)
    clean = draw(logits, params)
    logits[1], logits[3, 500] = NAN, NAN
    bad = draw(logits, params)
    assert (bad.tokens[::2] == clean.tokens[::2]).all()
    assert bad.flags.tolist() == [0, Flag.NONFINITE | Flag.NO_CANDIDATE, 0, Flag.NONFINITE, 0]
    assert bad.tokens[1] == NO_TOKEN
    assert 0 <= bad.tokens[3] < 1000


# --- filters and ties --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [9_999_999, 2**31 - 1, 1000, 0, -1])
def test_top_k_of_the_vocabulary_or_more_is_no_limit(top_k):
    """sendnn-inference#542."""
    logits = np.random.default_rng(542).normal(size=1000)
    assert draw_row(logits, top_k=top_k, seed=3) == draw_row(logits, seed=3)


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_top_k_keeps_exactly_k_of_tied_ids(rows):
    """vllm#50979: [3, 2, 2, 2, 1], k = 2: the two lowest ids of the ranking, at every batch size."""
    logits = np.tile(np.array([3, 2, 2, 2, 1], np.float32), (rows, 1))
    processed = np.empty_like(logits)
    draw(logits, RowParams.uniform(rows, top_k=2), processed=processed)
    assert (processed == [3, 2, -INFINITY, -INFINITY, -INFINITY]).all()


def test_top_k_renormalises_what_it_keeps():
    """flashinfer#3774: p = [.4, .3, .3, 0], k = 2: ids 0 and 1 with .571 and .429, 4,000 seeds.

    False alarm 1e-6. Caught with power 0.99: a share wrong by 0.06.
    """
    with np.errstate(divide="ignore"):
        logits = np.log([0.4, 0.3, 0.3, 0])
    tokens = draw_many(logits, seeds=range(4000), top_k=2)
    assert_goodness_of_fit(observed=np.bincount(tokens, minlength=4), probabilities=[4, 3, 0, 0], claim="k of 2")


def test_top_k_of_one_is_argmax():
    """mstar#254: tied maxima; the lowest id at every seed."""
    assert set(draw_many([1, 5, 5, 0, 5], seeds=range(200), top_k=1)) == {1}


def test_smallest_nucleus_of_equal_logits_is_argmax():
    """Four equal logits, top_p = 1e-6: id 0, as argmax. lmms-eval#1265, op part: 0 is never taken for 1."""
    for top_p in (1e-6, 1e-45, 0.0):
        assert draw_row([2, 2, 2, 2], top_p=top_p, seed=9).kept == [0]


def test_min_p_keeps_what_reaches_its_share_of_the_best():
    """sglang#33695: p = [.05, .55, .10, .30], min_p = .5, seeds 0 to 127: ids 1 and 3 only, and repeatable."""
    logits = np.log([0.05, 0.55, 0.10, 0.30])
    tokens = draw_many(logits, seeds=range(128), min_p=0.5)
    assert set(tokens.tolist()) == {1, 3}
    assert (tokens == draw_many(logits, seeds=range(128), min_p=0.5)).all()


@pytest.mark.parametrize(("temperature", "kept"), [(0.5, [0]), (1.0, [0, 1]), (2.0, [0, 1, 2])])
def test_min_p_sees_the_tempered_distribution(temperature, kept):
    """vllm-metal#728: ratios to the best of .5 and .167 become their powers 1 / T; the logits are not written to."""
    logits = np.log([0.6, 0.3, 0.1]).astype(np.float32)
    before = logits.copy()
    assert draw_row(logits, temperature=temperature, min_p=0.4).kept == kept
    assert (logits == before).all()


def test_min_p_of_one_keeps_the_tied_best():
    """min_p = 1 keeps all ids of the largest value, no other."""
    assert draw_row([1, 3, 2.9999998, 3], min_p=1.0).kept == [1, 3]


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.45, 2), (0.6, 3), (0.75, 4), (0.9, 5), (0.99, 6)])
def test_nucleus_ends_inside_a_tied_group_at_the_lowest_ids(top_p, kept):
    """vllm-ascend#13847, vllm#54651: the kept set is a prefix of the ranking, reaches top_p, and is the shortest."""
    logits = np.array([1, 2, 1, 0, 1, 1, -2], np.float32)
    ranking = [1, 0, 2, 4, 5, 3, 6]
    outcome = draw_row(logits, top_p=top_p)
    assert outcome.kept == sorted(ranking[:kept])
    mass = np.exp(logits.astype(np.float64))
    share = mass[ranking[:kept]].sum() / mass.sum()
    assert share >= top_p > share - mass[ranking[kept - 1]] / mass.sum()


@pytest.mark.parametrize("top_p", [0.9, 0.99, 0.999, 0.9999])
def test_nucleus_with_one_dominant_token_keeps_the_required_ids_and_no_others(top_p):
    """vllm#59785, #48927: one id holds over 40% of the mass, the rest is a long flat tail."""
    logits = bfloat16(np.random.default_rng(59785).normal(0, 1, 5000))
    logits[1234] = np.log(np.exp(logits.astype(np.float64)).sum() * 0.8)
    x = naive.tempered(logits.tolist(), 1.0)
    assert draw_row(logits, top_p=top_p).kept == naive.kept(x, naive.Parameters(top_p=top_p))


def test_nucleus_of_a_large_bfloat16_row_equals_that_of_exact_sums():
    """Megatron#7182: V = 131,072, top_p .95: the kept set of exactly rounded sums; float32 sums miss it."""
    logits = bfloat16(np.random.default_rng(7182).normal(0, 2, 131_072))
    x = naive.tempered(logits.tolist(), 1.0)
    exact = naive.kept(x, naive.Parameters(top_p=0.95))
    assert draw_row(logits, top_p=0.95).kept == exact
    ranked = np.sort(logits)[::-1]
    mass = np.cumsum(np.exp(ranked - ranked[0]), dtype=np.float32)
    assert 1 + np.searchsorted(mass, np.float32(0.95) * mass[-1]) != len(exact), "the row should have been a hard one"


# --- ids, masks, neighbours --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_id_is_never_drawn_and_is_counted(temperature):
    """vllm#13175: a head of 151,936 over a tokenizer of 151,665; the padded ids have the largest logits."""
    logits = np.random.default_rng(13175).normal(size=151_936).astype(np.float32)
    masked = np.where(np.arange(151_936) < 151_665, logits, -INFINITY)
    logits[151_665:] = 100.0
    for seed in range(3):
        outcome = draw_row(logits, temperature=temperature, seed=seed, usable_vocab=151_665)
        assert outcome.flags == Flag.PADDED
        assert (outcome.token, outcome.kept) == draw_row(masked, temperature=temperature, seed=seed)[::2]


def test_padded_id_is_counted_exactly_when_it_would_have_won():
    """vllm#13175: 10 ids, 6 of them known; flagged is where the row without a limit draws one of the others."""
    logits, rows = np.zeros((300, 10), np.float32), np.arange(300)
    params = RowParams.uniform(300)
    params.seed[:] = rows
    unlimited, limited = draw(logits, params), draw(logits, params, usable_vocab=6)
    padded = unlimited.tokens >= 6
    assert (limited.flags == np.where(padded, Flag.PADDED, 0)).all()
    assert (limited.tokens[~padded] == unlimited.tokens[~padded]).all()
    assert (limited.tokens < 6).all()
    assert 60 < padded.sum() < 180


def test_row_whose_only_candidates_are_padded_has_no_token():
    """vllm#13175, vllm#53665: every known id is masked."""
    logits = [-INFINITY] * 6 + [1.0] * 4
    assert draw_row(logits, usable_vocab=6) == (NO_TOKEN, Flag.NO_CANDIDATE | Flag.PADDED, [])


def test_swapped_masks_are_exchanged_not_duplicated():
    """vllm#48419: two rows with disjoint allowed ids, then the same rows in the other order."""
    logits = np.random.default_rng(48419).normal(size=(2, 100)).astype(np.float32)
    logits[0, ::2], logits[1, 1::2] = -INFINITY, -INFINITY
    params = RowParams.uniform(2)
    params.seed[:] = [1, 2]
    tokens = draw(logits, params).tokens
    assert tokens.tolist() == draw(logits[::-1], take(params, [1, 0])).tokens[::-1].tolist()
    assert [math.isfinite(logits[row, token]) for row, token in enumerate(tokens)] == [True, True]
    assert tokens[0] % 2 == 1
    assert tokens[1] % 2 == 0
