"""Judges from sums over live traffic whether tokens were drawn by their distribution: mathematics, no input or output.

Nothing is assumed about model, prompts or parameters, which differ from token to token. Given everything before it,
token i is drawn from a known law p_i, so each test sums differences from what p_i makes expected, and those have mean
zero if the draw is exact. Such a sum is a martingale, whose variance is the sum of the known conditional variances.

Four tests have a chance of calling an exact sampler inexact. `verdicts` gives each of them a quarter of the rate asked
for (Bonferroni); a fifth, that no token lies outside the filters, has none. Who looks again and again takes
`rate_of_look`. Every p-value below is no smaller than the truth where the law of a statistic is known in part only:

law: D = sum of surprisal - sum of entropy, V = sum of variances. D / sqrt(V) is N(0, 1) in the limit (martingale
    central limit theorem: Hall and Heyde 1980, theorem 3.2; the sum goes over many requests, so that V is as good as
    known). Far out the limit comes late, since surprisals have a heavy tail: z = D / sqrt(V + b |D| / 3) is
    compared instead, the denominator of Bernstein's inequality for steps up to b (Freedman 1975). Of n tokens one has
    a surprisal above b with chance n W exp(-b) at most, W ids having each less than exp(-b); b is chosen so that this
    is a hundredth of the rate.
scores: the winning score less logsumexp is Gumbel(0, 1) and independent of all before, so that 20 bins of its
    distribution function have equal chances. Pearson's chi-square, 19 degrees of freedom.
rows: T = sum over steps of (sum of z)^2 - sum of z^2 adds z_j z_k over the ordered pairs of a step, P of them; its
    variance is 2 P. A step of m rows has the quadratic form with eigenvalues m - 1, once, and -1, m - 1 times, so that
    its cumulants are at most those of c (X - nu), X chi-square with nu = m (m - 1) / c^2 degrees of freedom, for any
    c >= m - 1, in absolute value too. Cumulants add up: Chernoff's bound for that law with nu = P / c^2 holds for T on
    both sides, P(|T| >= t) <= 2 exp(-nu / 2 (u - ln(1 + u))), u = t c / P, however many rows the steps have. The
    product of normals' heavy tail is in it.
improbable: how many were seen among independent events of known small chances, against a Poisson law. Both of its tails
    are heavier than those of the sum of such events (Hoeffding 1956; Anderson and Samuels 1967), so the rate is kept
    when the chances are not that small.

What is not exact but rounded in `kernels/statistics` shifts each test by a known amount at most; that much is allowed,
so that a billion tokens do not prove float32 wrong.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from statistics import NormalDist

from vllm_gumbel.metrics.evidence import PIT_BINS

#: How many of the tests can fail an exact sampler.
RANDOM_TESTS = 4
#: Chance with which an error of the size named is seen.
POWER = 0.99
#: Scores below which they are not judged. Of 20 million simulated tables of so many 1.07 times as many as chi-square's
#: law says passed its threshold of 1e-5, and 1.15 times that of 1e-6; of 200 scores 1.7 and 2.0 times.
LEAST_SCORES = 1000
#: A law is called exact when a temperature wrong by this would be seen, and rows when this correlation would be.
LEAST_TEMPERATURE_ERROR, LEAST_CORRELATION = 0.25, 0.1
#: Most ids of a vocabulary, and most tested rows of a step, that are reckoned with.
LARGEST_VOCABULARY, LARGEST_STEP = 2**20, 4096
#: Largest errors of `kernels/statistics`: of a surprisal, entropy or score, and of an improbable mass relative to it.
NATS_ROUNDING, MASS_ROUNDING = 3e-5, 1e-3

_NORMAL = NormalDist()


class State(StrEnum):
    """What a test, or all of them, say."""

    EXACT = "exact"
    INEXACT = "not exact"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Evidence:
    """Sums over the watched tokens of one arm; what the metrics of the same names hold.

    Attributes:
        watched, tested: tokens; only tested ones are in the sums of the next three and in the scores.
        surprisal, entropy: nats.
        variance: nats^2.
        pit: tested tokens by bin [20]; empty for an arm whose sampler has no scores.
        score_squares, score_step_squares, score_pairs: sums of z^2, of (sum of z)^2 over steps, and of ordered pairs.
        improbable, improbable_expected: watched tokens drawn improbable, and how many an exact sampler draws.
        outside_filter: watched tokens that the filters had excluded.
    """

    watched: float = 0.0
    tested: float = 0.0
    surprisal: float = 0.0
    entropy: float = 0.0
    variance: float = 0.0
    pit: tuple[float, ...] = ()
    score_squares: float = 0.0
    score_step_squares: float = 0.0
    score_pairs: float = 0.0
    improbable: float = 0.0
    improbable_expected: float = 0.0
    outside_filter: float = 0.0

    def __add__(self, other: "Evidence") -> "Evidence":
        """Return the evidence of two engines together."""
        return self._combined(other, 1)

    def __sub__(self, other: "Evidence") -> "Evidence":
        """Return the evidence that came between two looks, `other` the earlier one."""
        return self._combined(other, -1)

    def _combined(self, other: "Evidence", sign: int) -> "Evidence":
        sums = {f.name: getattr(self, f.name) + sign * getattr(other, f.name) for f in fields(self) if f.name != "pit"}
        mine, theirs = (each.pit or (0.0,) * PIT_BINS for each in (self, other))
        pit = tuple(a + sign * b for a, b in zip(mine, theirs, strict=True)) if self.pit or other.pit else ()
        return Evidence(**sums, pit=pit)


@dataclass(frozen=True)
class Verdict:
    """What one test says.

    Attributes:
        test: its name.
        state: of it.
        says: the numbers in words; for `UNKNOWN` why.
        statistic: z of the law, chi-square, correlation of rows, or a count; None where there is nothing to compute.
        p_value: chance of a statistic as far out if the sampler is exact; None where there is none.
        rate: `p_value` below which it is not exact.
        essential: whether an arm whose test is `UNKNOWN` cannot be called exact.
    """

    test: str
    state: State
    says: str
    statistic: float | None = None
    p_value: float | None = None
    rate: float = 0.0
    essential: bool = False


def verdicts(evidence: Evidence, alpha: float = 1e-6) -> list[Verdict]:
    """Return the verdict of every test: law, scores, rows, improbable, outside_filter.

    Args:
        evidence: of one arm.
        alpha: chance that an exact sampler fails any of them.

    Raises:
        ValueError: alpha is not between 0 and 1.
    """
    rate = _rate(alpha)
    return [test(evidence, rate) for test in (_law, _scores, _rows, _improbable, _outside_filter)]


def overall(all_verdicts: Sequence[Verdict]) -> State:
    """Return what the verdicts of an arm say together."""
    if any(each.state is State.INEXACT for each in all_verdicts):
        return State.INEXACT
    if any(each.essential and each.state is State.UNKNOWN for each in all_verdicts):
        return State.UNKNOWN
    return State.EXACT


def rate_of_look(alpha: float, look: int) -> float:
    """Return the alpha of the `look`-th look, from 1, at growing evidence: alpha / (k (k + 1)), which sums to alpha."""
    return alpha / (look * (look + 1))


def tokens_needed(evidence: Evidence, error: str, alpha: float = 1e-6) -> float | None:
    """Return how many tokens like those of the evidence show an error of this size, with chance `POWER`.

    With v the variance per token, z_a and z_b the normal quantiles of the test's rate and of the power:

    - a temperature off by d: mean surprisal moves by v d / (1 + d), since its derivative by the inverse temperature is
      minus its variance; n = ((z_a + z_b) (1 + d) / (d sqrt(v)))^2, and more while Bernstein's term counts.
    - a share m of the mass never drawn, whichever ids: the best of the others is a Gumbel moved by ln(1 - m), so a bin
      from s to t gets t^(1 - m) - s^(1 - m); n = L / sum((that - 1/20)^2 20), about L / m^2, with L the noncentrality
      at which chi-square passes its threshold with that power.
    - improbable ids never drawn: seen is 0, so 2 exp(-expected) must reach the rate; whatever the power.

    Args:
        evidence: of one arm.
        error: a key of `ERRORS`.
        alpha: as in `verdicts`.

    Returns:
        Tested tokens; None if no number of tokens like these can show it.

    Raises:
        KeyError: `error` is none of them.
        ValueError: alpha is not between 0 and 1.
    """
    return ERRORS[error](evidence, _rate(alpha))


def chi_square_tail(statistic: float, freedom: int, noncentrality: float = 0.0) -> float:
    """Return the chance that a (noncentral) chi-square variable with an odd number of degrees exceeds a value.

    With h half the value, the central tail is erfc(sqrt(h)) + exp(-h) sum of h^(j + 1/2) / Gamma(j + 3/2) over
    0 <= j < (freedom - 1) / 2 (Abramowitz and Stegun 26.4.4); the noncentral one is a Poisson mixture of those with 2
    degrees more each (26.4.25).
    """
    if statistic <= 0:
        return 1.0
    h, mean = statistic / 2, noncentrality / 2
    tail = math.erfc(math.sqrt(h)) + sum(_power_term(h, j + 0.5) for j in range((freedom - 1) // 2))
    if mean <= 0:
        return min(1.0, tail)
    total, last = 0.0, int(mean + 12 * math.sqrt(mean) + 40)
    for j in range(last):
        total += _power_term(mean, j) * tail
        tail += _power_term(h, freedom / 2 + j)
    return min(1.0, total)


def poisson_tails(count: int, mean: float) -> tuple[float, float]:
    """Return the chances of at most and of at least `count` events under a Poisson law."""
    if mean <= 0:
        return 1.0, float(count <= 0)
    here = _power_term(mean, count)
    if count > mean:  # the tail that is summed is the small one, so that it keeps its digits
        above = _falling_sum(here, lambda j: mean / (count + j))
        return min(1.0, 1 - above + here), min(1.0, above)
    below = _falling_sum(here, lambda j: (count - j + 1) / mean)
    return min(1.0, below), min(1.0, 1 - below + here)


def _law(e: Evidence, rate: float) -> Verdict:
    if e.tested <= 0 or e.variance <= 0:
        says = f"{e.tested:,.0f} tested tokens, none of them left to chance"
        return Verdict("law", State.UNKNOWN, says, rate=rate, essential=True)
    difference = e.surprisal - e.entropy
    z = difference / math.sqrt(e.variance)
    beyond = max(0.0, abs(difference) - NATS_ROUNDING * e.tested)
    p = math.erfc(beyond / math.sqrt(2 * (e.variance + _jump(e.tested, rate) * beyond / 3)))
    says = (
        f"mean surprisal {e.surprisal / e.tested:.4f} nats, the distributions' entropy {e.entropy / e.tested:.4f}: "
        f"z = {z:.2f}"
    )
    needed = _tokens_for_temperature(e, rate, LEAST_TEMPERATURE_ERROR)
    enough = needed is not None and e.tested >= needed
    return _judged("law", says, z, p, rate, essential=True, enough=enough)


def _scores(e: Evidence, rate: float) -> Verdict:
    n = sum(e.pit)
    if not e.pit:
        return Verdict("scores", State.UNKNOWN, "the sampler of this arm does not say with which score a token won")
    if n < LEAST_SCORES:
        says = f"{n:,.0f} scores: too few to judge by"
        return Verdict("scores", State.UNKNOWN, says, rate=rate, essential=True)
    statistic = sum((count - n / PIT_BINS) ** 2 for count in e.pit) * PIT_BINS / n
    # A bin has two edges, where the distribution function rises by 1/e a nat at most.
    rounding = n * PIT_BINS * PIT_BINS * (2 * NATS_ROUNDING / math.e) ** 2
    p = chi_square_tail(statistic, PIT_BINS - 1, rounding)
    says = f"chi-square {statistic:.1f} of {PIT_BINS - 1} degrees of freedom over {n:,.0f} scores"
    return _judged("scores", says, statistic, p, rate, essential=True)


def _rows(e: Evidence, rate: float) -> Verdict:
    pairs = e.score_pairs
    if not e.pit or pairs <= 0:
        return Verdict("rows", State.UNKNOWN, "no two scores of one step, so nothing to correlate", rate=rate)
    difference = e.score_step_squares - e.score_squares
    says = f"scores within a step correlate by {difference / pairs:.5f} over {pairs:,.0f} pairs"
    enough = _rows_p_value(LEAST_CORRELATION * pairs - _quantile(1 - POWER) * math.sqrt(2 * pairs), pairs) < rate
    return _judged("rows", says, difference / pairs, _rows_p_value(abs(difference), pairs), rate, enough=enough)


def _rows_p_value(difference: float, pairs: float) -> float:
    """Return the module's bound; rows of a step are at most about sqrt(pairs), whatever the steps."""
    if pairs <= 0 or difference <= 0:
        return 1.0
    c = min(LARGEST_STEP, max(1.0, math.sqrt(pairs)))
    u = difference * c / pairs
    return min(1.0, 2 * math.exp(-pairs / (c * c) / 2 * (u - math.log1p(u))))


def _improbable(e: Evidence, rate: float) -> Verdict:
    seen, expected = round(e.improbable), e.improbable_expected
    says = f"{seen:,} improbable tokens drawn, {expected:,.2f} expected"
    low, high = (expected * (1 + sign * MASS_ROUNDING) for sign in (-1, 1))
    p = min(1.0, 2 * min(poisson_tails(seen, low)[0], poisson_tails(seen, high)[1]))
    if p < rate and e.watched > e.tested:
        others = (
            f"{e.watched - e.tested:,.0f} of {e.watched:,.0f} watched tokens are greedy or of a request with a seed"
        )
        return Verdict("improbable", State.UNKNOWN, f"{says}; {others}, and may repeat one draw", seen, p, rate)
    return _judged("improbable", says, seen, p, rate, enough=2 * math.exp(-low) < rate)


def _outside_filter(e: Evidence, rate: float) -> Verdict:
    says = f"{e.outside_filter:,.0f} of {e.watched:,.0f} watched tokens outside what the filters keep"
    if not e.pit:
        return Verdict("outside_filter", State.UNKNOWN, f"{says}; vLLM's own sampler keeps more than top_k on ties")
    if not e.watched:
        return Verdict("outside_filter", State.UNKNOWN, "no watched tokens")
    state = State.INEXACT if e.outside_filter else State.EXACT
    return Verdict("outside_filter", state, says, e.outside_filter)


def _judged(
    test: str, says: str, statistic: float, p: float, rate: float, *, essential: bool = False, enough: bool = True
) -> Verdict:
    """Return a verdict; without `enough` to see an error by, no p-value shows that there is none."""
    if p < rate:
        return Verdict(test, State.INEXACT, says, statistic, p, rate, essential)
    if not enough:
        return Verdict(test, State.UNKNOWN, f"{says}; too few to tell", statistic, p, rate, essential)
    return Verdict(test, State.EXACT, says, statistic, p, rate, essential)


def _tokens_for_temperature(e: Evidence, rate: float, error: float) -> float | None:
    """Return the least n at which the mean shift passes the threshold of `_law` by the power's share of sigma."""
    if not e.tested or e.variance <= 0:
        return None
    v, z = e.variance / e.tested, _quantile(rate / 2)
    shift = v * error / (1 + error) - NATS_ROUNDING

    def shows(n: float) -> bool:
        half = z * z * _jump(n, rate) / 6
        threshold = half + math.sqrt(half * half + z * z * v * n)
        return n * shift >= threshold + _quantile(1 - POWER) * math.sqrt(v * n)

    return _least(shows) if shift > 0 else None


def _tokens_for_missing_mass(e: Evidence, rate: float, share: float) -> float | None:
    scores = sum(e.pit)
    if not scores:
        return None
    edges = [(i / PIT_BINS) ** (1 - share) for i in range(PIT_BINS + 1)]
    per_token = PIT_BINS * sum((b - a - 1 / PIT_BINS) ** 2 for a, b in itertools.pairwise(edges))
    threshold = _least(lambda x: chi_square_tail(x, PIT_BINS - 1) <= rate)
    needed = _least(lambda n: chi_square_tail(threshold, PIT_BINS - 1, n * per_token) >= POWER)
    return needed * e.tested / scores


def _tokens_for_missing_tail(e: Evidence, rate: float) -> float | None:
    if not e.tested or e.improbable_expected <= 0:
        return None
    return math.log(2 / rate) / (1 - MASS_ROUNDING) * e.tested / e.improbable_expected


#: Errors that `tokens_needed` knows, in words.
ERRORS: dict[str, Callable[[Evidence, float], float | None]] = {
    "a temperature wrong by 5%": lambda e, rate: _tokens_for_temperature(e, rate, 0.05),
    "a temperature wrong by 1%": lambda e, rate: _tokens_for_temperature(e, rate, 0.01),
    "1% of the mass never drawn": lambda e, rate: _tokens_for_missing_mass(e, rate, 0.01),
    "improbable tokens never drawn": _tokens_for_missing_tail,
}


def _rate(alpha: float) -> float:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")
    return alpha / RANDOM_TESTS


def _jump(tokens: float, rate: float) -> float:
    """Return b of the module: the surprisal that none of so many tokens exceeds, but for a hundredth of the rate."""
    return math.log(max(tokens, 1) * LARGEST_VOCABULARY * 100 / rate)


def _quantile(tail: float) -> float:
    """Return what a standard normal variable exceeds with this chance."""
    return -_NORMAL.inv_cdf(tail)


def _power_term(x: float, a: float) -> float:
    """Return x^a exp(-x) / Gamma(a + 1), for x > 0."""
    return math.exp(a * math.log(x) - x - math.lgamma(a + 1))


def _falling_sum(first: float, ratio: Callable[[int], float]) -> float:
    """Return the sum of a series whose j-th term is `ratio(j)` times the one before, with falling ratios below 1."""
    total, term, j = 0.0, first, 0
    while term > total * 1e-17:
        total += term
        j += 1
        term *= ratio(j)
    return total


def _least(holds: Callable[[float], bool]) -> float:
    """Return the least number at which a condition that stays true once it is true holds, to 1e-6 of it."""
    high = 1.0
    while not holds(high):
        high *= 2
    low = high / 2
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
