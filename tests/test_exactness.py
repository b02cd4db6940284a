"""Exactness is judged at the rates it names: simulated servers, and the tails against SciPy.

Simulated servers draw from known laws by NumPy. How many of them are called not exact is itself a Poisson count,
accepted with a false-alarm rate of 1e-6; seeds are fixed.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from tests.statistics import poisson_interval
from vllm_gumbel.metrics import exactness
from vllm_gumbel.metrics.evidence import PIT_BINS
from vllm_gumbel.metrics.exactness import (
    ERRORS,
    RANDOM_TESTS,
    Evidence,
    State,
    chi_square_tail,
    overall,
    poisson_tails,
    rate_of_look,
    tokens_needed,
    verdicts,
)

SERVERS, IDS = 2000, 30
_SHAPE = np.random.default_rng(1).standard_normal((12, IDS)) * np.geomspace(0.5, 5, 12)[:, None]
#: Laws [12, ids] from nearly even, 3.3 nats, to nearly certain.
LAWS = np.exp(_SHAPE) / np.exp(_SHAPE).sum(1, keepdims=True)


def surprisals(laws):
    return -np.log(laws)


def moments(laws):
    """Return entropy and variance of the surprisal of each law [.., ids]."""
    entropy = (laws * surprisals(laws)).sum(-1)
    return entropy, (laws * surprisals(laws) ** 2).sum(-1) - entropy**2


def counted(surprisal, entropy, variance, tested, **others):
    """Return evidence whose other tests have nothing to object to."""
    even = (tested / PIT_BINS,) * PIT_BINS
    return Evidence(tested, tested, float(surprisal), float(entropy), float(variance), **{"pit": even, **others})


def of(test, evidence, alpha):
    return next(verdict for verdict in verdicts(evidence, alpha) if verdict.test == test)


def refused(test, servers, alpha):
    """Return how many servers a test calls not exact; all of them must be judged."""
    states = [of(test, evidence, alpha).state for evidence in servers]
    assert State.UNKNOWN not in states
    return states.count(State.INEXACT)


def texts(seed, tokens, drawn_laws=LAWS, servers=SERVERS):
    """Return the evidence of servers whose next law depends on the token just drawn, as in a text.

    Args:
        seed: of NumPy.
        tokens: that each of them draws.
        drawn_laws: from which they do; what is expected comes from `LAWS` all the same.
        servers: how many.
    """
    random, cumulated = np.random.default_rng(seed), np.cumsum(drawn_laws, axis=1)[:, :-1]
    entropy, variance = moments(LAWS)
    now, sums = np.zeros(servers, np.int64), np.zeros((3, servers))
    for _ in range(tokens):
        token = (random.random((servers, 1)) > cumulated[now]).sum(1)
        sums += surprisals(LAWS)[now, token], entropy[now], variance[now]
        now = (now * 5 + token) % len(LAWS)
    return [counted(*row, tested=tokens) for row in sums.T]


def tempered(temperature):
    laws = LAWS ** (1 / temperature)
    return laws / laws.sum(1, keepdims=True)


@pytest.fixture(scope="module")
def exact_texts():
    return texts(seed=2, tokens=4000)


def accepted(alpha, share=1.0):
    """Return how many of `SERVERS`, or of this share of them, an exact test may refuse that spends its rate."""
    return poisson_interval(mean=SERVERS * alpha / RANDOM_TESTS * share, false_alarm=1e-6)


@pytest.mark.parametrize("alpha", [1e-2, 0.1, 0.4])
def test_exact_law_is_refused_at_the_rate_asked_for(exact_texts, alpha):
    """Not more often, and not less than a quarter as often, which is what Bernstein's term costs at 4,000 tokens."""
    count = refused("law", exact_texts, alpha)
    assert accepted(alpha, 0.25)[0] <= count <= accepted(alpha)[1]


@pytest.mark.parametrize("alpha", [1e-2, 0.1, 0.4])
def test_exact_scores_are_refused_at_the_rate_asked_for(alpha):
    tables = np.random.default_rng(3).multinomial(2000, [1 / PIT_BINS] * PIT_BINS, size=SERVERS)
    low, high = accepted(alpha)
    assert low <= refused("scores", [counted(1, 1, 1, 2000, pit=tuple(table)) for table in tables], alpha) <= high


@pytest.mark.parametrize("rows", [(2,), (1, 2, 40), (64,)], ids=str)
@pytest.mark.parametrize("alpha", [1e-2, 0.4])
def test_independent_rows_are_refused_at_most_at_the_rate_asked_for(rows, alpha):
    """Steps of two rows are nearly normal, steps of 64 nearly chi-square with a degree of freedom each."""
    random, servers = np.random.default_rng(4), []
    steps = max(1, round(40_000 / sum(m * (m - 1) for m in rows)))
    for _ in range(SERVERS // 4):
        z = [random.standard_normal((steps, m)) for m in rows]
        squares = sum(float((each**2).sum()) for each in z)
        step_squares = sum(float((each.sum(1) ** 2).sum()) for each in z)
        pairs = steps * sum(m * (m - 1) for m in rows)
        servers.append(
            counted(1, 1, 1, 2000, score_squares=squares, score_step_squares=step_squares, score_pairs=pairs)
        )
    assert refused("rows", servers, alpha) <= accepted(alpha, 0.25)[1]


def test_bound_of_rows_holds_far_out_where_the_normal_law_does_not():
    """100,000 servers of 10 steps of 64 rows, exactly by chi-square variables; smallest excess caught: 1.5 times."""
    random, m, steps, rate = np.random.default_rng(5), 64, 10, 1e-3
    squares = m * random.chisquare(steps, 100_000)
    within = random.chisquare(steps * (m - 1), 100_000) + squares / m
    difference, pairs = squares - within, steps * m * (m - 1)
    p = np.array([exactness._rows_p_value(abs(each), pairs) for each in difference])
    high = poisson_interval(mean=len(p) * rate, false_alarm=1e-6)[1]
    assert (p < rate).sum() <= high
    assert (2 * stats.norm.sf(abs(difference) / math.sqrt(2 * pairs)) < rate).sum() > 1.5 * high


@pytest.mark.parametrize("pairs", [100.0, 1e5, 1e9])
def test_bound_of_rows_is_chernoffs(pairs):
    """Twice the least value over t of E exp(t c (X - nu)) exp(-t excess), X chi-square with nu degrees of freedom."""
    c = min(exactness.LARGEST_STEP, math.sqrt(pairs))
    for difference in (0.5, 3.0, 8.0, 30.0):
        excess, t = difference * math.sqrt(2 * pairs), np.linspace(0, 1 / (2 * c), 100_001)[:-1]
        exponent = (-pairs / c**2 * (np.log1p(-2 * c * t) / 2 + c * t) - t * excess).min()
        expected = min(1.0, 2 * math.exp(exponent))
        assert exactness._rows_p_value(excess, pairs) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("chance", [1e-4, 0.3])
@pytest.mark.parametrize("alpha", [1e-2, 0.4])
def test_improbable_tokens_of_an_exact_server_are_refused_at_most_at_the_rate_asked_for(chance, alpha):
    """Of 200,000 tokens 20, as a Poisson law has them; of 200 60, fewer being far out than by a Poisson law."""
    tokens = round(20 / chance) if chance < 0.1 else 200
    seen = np.random.default_rng(6).binomial(tokens, chance, size=SERVERS)
    expected = tokens * chance
    servers = [counted(1, 1, 1, tokens, improbable=float(s), improbable_expected=expected) for s in seen]
    assert refused("improbable", servers, alpha) <= accepted(alpha)[1]


def test_rare_surprises_are_no_evidence_though_the_normal_law_says_so():
    """100,000 exact servers of 100,000 tokens, each a surprise of 11.5 nats with chance 1e-5: z is their number less 1.

    z passes 5, whose chance is 6e-7 by the normal law, 8 times.
    """
    tokens, law = 100_000, np.array([1 - 1e-5, 1e-5])
    entropy, variance = (tokens * float(each) for each in moments(law))
    hits = np.random.default_rng(7).binomial(tokens, law[1], size=100_000)
    surprisal = hits * surprisals(law)[1] + (tokens - hits) * surprisals(law)[0]
    alarms = surprisal[(surprisal - entropy) / math.sqrt(variance) > 5]
    assert len(alarms) >= 2
    for each in alarms:
        assert of("law", counted(each, entropy, variance, tokens), RANDOM_TESTS * 6e-7).state is not State.INEXACT


def test_temperature_error_is_seen_at_the_number_of_tokens_that_is_named(exact_texts):
    """By 99% of 400 servers 5% too hot; by less than half at a quarter of the tokens."""
    error, alpha = "a temperature wrong by 5%", 1e-6
    needed = math.ceil(tokens_needed(sum_of(exact_texts), error, alpha))
    assert 2_000 < needed < 30_000
    hot = texts(seed=8, tokens=needed, drawn_laws=tempered(1.05), servers=400)
    assert refused("law", hot, alpha) >= poisson_miss(0.99, 400)
    early = texts(seed=9, tokens=needed // 4, drawn_laws=tempered(1.05), servers=400)
    assert [of("law", each, alpha).state for each in early].count(State.INEXACT) < 200


def sum_of(servers):
    total = Evidence()
    for each in servers:
        total = total + each
    return total


def poisson_miss(power, servers=SERVERS):
    """Return the fewest servers that are caught at this power."""
    return servers - poisson_interval(mean=servers * (1 - power), false_alarm=1e-6)[1]


def test_missing_mass_is_seen_at_the_number_of_tokens_that_is_named():
    """The best of ids that hold 99% of the mass, whose scores are simulated as u^(1 / 0.99)."""
    evidence, error, alpha = counted(2e5, 2e5, 2e5, 1e5), "1% of the mass never drawn", 1e-6
    needed = math.ceil(tokens_needed(evidence, error, alpha))
    assert 5e5 < needed < 2e6
    edges = np.linspace(0, 1, PIT_BINS + 1) ** 0.99
    random = np.random.default_rng(10)
    tables = random.multinomial(needed, np.diff(edges), size=SERVERS)
    late = refused("scores", [counted(1, 1, 1, needed, pit=tuple(table)) for table in tables], alpha)
    assert late >= poisson_miss(0.99)
    tables = random.multinomial(needed // 2, np.diff(edges), size=SERVERS)
    early = refused("scores", [counted(1, 1, 1, needed // 2, pit=tuple(table)) for table in tables], alpha)
    assert early < 0.9 * SERVERS


def test_scores_of_a_race_without_some_ids_have_the_law_that_the_number_of_tokens_rests_on():
    """A real race in which ids of 20% of the mass take no part; their absence moves the scores as it says."""
    random, law = np.random.default_rng(11), np.array([0.5, 0.3, 0.15, 0.05])
    scores = (np.log(law) + random.gumbel(size=(200_000, 4)))[:, :2].max(1)
    counts = np.histogram(np.exp(-np.exp(-scores)), bins=np.linspace(0, 1, PIT_BINS + 1))[0]
    expected = np.diff(np.linspace(0, 1, PIT_BINS + 1) ** 0.8) * 200_000
    assert ((counts - expected) ** 2 / expected).sum() < stats.chi2.isf(1e-6, PIT_BINS - 1)


def test_tail_that_is_never_drawn_is_seen_at_the_number_of_tokens_that_is_named():
    evidence = counted(2e5, 2e5, 2e5, 1e5, improbable=3.0, improbable_expected=3.0)
    needed = tokens_needed(evidence, "improbable tokens never drawn", 1e-6)
    states = [
        of("improbable", counted(1, 1, 1, n, improbable_expected=n * 3e-5), 1e-6).state
        for n in (needed * 0.99, needed * 1.01)
    ]
    assert states == [State.UNKNOWN, State.INEXACT]


@pytest.mark.parametrize("error", ERRORS)
def test_tokens_needed_fall_with_alpha_and_without_evidence_there_is_no_number(error):
    evidence = counted(2e5, 2e5, 2e5, 1e5, improbable_expected=3.0)
    numbers = [tokens_needed(evidence, error, alpha) for alpha in (1e-12, 1e-6, 1e-2)]
    assert numbers == sorted(numbers, reverse=True)
    assert tokens_needed(Evidence(), error) is None


def test_shared_noise_is_seen_and_is_none_of_the_law():
    """Eight rows of a step that get one number: z times 8, squared, is 8 times the sum of squares."""
    steps = 2_000
    squares = float((np.random.default_rng(12).standard_normal(steps) ** 2).sum())
    evidence = counted(
        2e4, 2e4, 4e4, 8 * steps, score_squares=8 * squares, score_step_squares=64 * squares, score_pairs=56 * steps
    )
    assert of("rows", evidence, 1e-6).state is State.INEXACT
    assert of("rows", evidence, 1e-6).statistic == pytest.approx(1, abs=0.1)
    assert of("law", evidence, 1e-6).state is State.EXACT
    assert overall(verdicts(evidence)) is State.INEXACT


def test_rounding_of_the_statistics_is_no_evidence_however_many_tokens_there_are():
    """1e11 tokens, each off by as much as `kernels/statistics` may be; ten times that is evidence."""
    n = 1e11
    for times, state in ((1, State.EXACT), (10, State.INEXACT)):
        bins = np.full(PIT_BINS, n / PIT_BINS) + n * times * 1e-5 * np.resize([1, -1], PIT_BINS)
        evidence = counted(2 * n + 3e-5 * n * times, 2 * n, 2 * n, n, pit=tuple(bins))
        assert [of(test, evidence, 1e-6).state for test in ("law", "scores")] == [state, state]
        evidence = counted(1, 1, 1, n, improbable=1e8 * (1 + 1e-3 * times), improbable_expected=1e8)
        assert of("improbable", evidence, 1e-6).state is state


def test_too_little_is_unknown_and_no_alarm():
    for evidence in (Evidence(), counted(20, 20, 20, 10), counted(1e5, 1e5, 1e-9, 1e5), counted(0, 0, 0, 1e6)):
        assert overall(verdicts(evidence)) is State.UNKNOWN
        assert of("law", evidence, 1e-6).state is State.UNKNOWN
    assert of("scores", counted(1, 1, 1, 999), 1e-6).state is State.UNKNOWN
    assert of("rows", counted(1, 1, 1, 1e5, score_pairs=1000.0, score_step_squares=99.0), 1e-6).state is State.UNKNOWN


def test_gross_errors_are_seen_in_little_evidence():
    """Surprisals 1 nat above the entropy of 500 tokens; 16 rows of one step with one number, 100 times."""
    assert of("law", counted(1500, 1000, 1000, 500), 1e-6).state is State.INEXACT
    evidence = counted(1, 1, 1, 1600, score_squares=1600.0, score_step_squares=25600.0, score_pairs=24000.0)
    assert of("rows", evidence, 1e-6).state is State.INEXACT


def test_one_improbable_token_is_enough_where_none_is_expected_and_no_draw_may_repeat():
    evidence = counted(2e5, 2e5, 2e5, 1e5, improbable=1.0, improbable_expected=1e-8)
    assert of("improbable", evidence, 1e-6).state is State.INEXACT
    seeded = replace(evidence, watched=evidence.tested + 1)
    assert of("improbable", seeded, 1e-6).state is State.UNKNOWN
    assert overall(verdicts(seeded)) is State.EXACT


def test_token_outside_the_filters_is_enough_where_the_sampler_is_ours():
    evidence = counted(2e5, 2e5, 2e5, 1e5, outside_filter=1.0)
    assert of("outside_filter", evidence, 1e-6).state is State.INEXACT
    stock = replace(evidence, pit=())
    assert of("outside_filter", stock, 1e-6).state is State.UNKNOWN
    assert "does not say with which score" in of("scores", stock, 1e-6).says
    assert overall(verdicts(stock)) is State.EXACT


def test_evidence_adds_over_engines_and_subtracts_over_time():
    one = counted(1, 2, 3, 40, improbable=5.0, score_pairs=7.0)
    two = counted(10, 20, 30, 400, improbable=50.0, score_pairs=70.0)
    both = one + two
    assert (both.surprisal, both.tested, both.improbable, both.score_pairs) == (11, 440, 55, 77)
    assert both.pit == (22.0,) * PIT_BINS
    assert both - two == one
    assert one - Evidence() == one
    assert (Evidence() + Evidence()).pit == ()


def test_looks_share_alpha():
    assert sum(rate_of_look(1e-2, look) for look in range(1, 100_000)) == pytest.approx(1e-2, rel=1e-4)


@pytest.mark.parametrize("alpha", [0, 1, -1, math.nan, math.inf])
def test_alpha_is_a_chance(alpha):
    with pytest.raises(ValueError, match="alpha must lie between 0 and 1"):
        verdicts(Evidence(), alpha)
    with pytest.raises(ValueError, match="alpha must lie between 0 and 1"):
        tokens_needed(Evidence(), next(iter(ERRORS)), alpha)


@pytest.mark.parametrize("freedom", [1, 3, 19])
@pytest.mark.parametrize("noncentrality", [0.0, 1e-3, 0.3, 5.0, 50.0, 500.0])
def test_chi_square_tail_is_scipys(freedom, noncentrality):
    for statistic in (0.1, 1.0, 5.0, 20.0, 60.0, 200.0, 700.0):
        expected = (
            stats.ncx2.sf(statistic, freedom, noncentrality) if noncentrality else stats.chi2.sf(statistic, freedom)
        )
        assert chi_square_tail(statistic, freedom, noncentrality) == pytest.approx(expected, rel=1e-6, abs=1e-15)
    assert chi_square_tail(0, freedom, noncentrality) == 1
    assert chi_square_tail(1e-300, freedom, noncentrality) == pytest.approx(1)


@pytest.mark.parametrize("mean", [1e-9, 1e-4, 0.5, 3.0, 40.0, 1100.0, 1.003e6])
def test_poisson_tails_are_scipys(mean):
    for count in (0, 1, 3, 50, 1000, 10**6):
        expected = stats.poisson.cdf(count, mean), stats.poisson.sf(count - 1, mean)
        assert poisson_tails(count, mean) == pytest.approx(expected, rel=1e-7, abs=1e-14)


def test_poisson_tails_without_a_mean():
    assert (poisson_tails(0, 0), poisson_tails(2, 0)) == ((1, 1), (1, 0))
