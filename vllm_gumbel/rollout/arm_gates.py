"""Gates about what one arm draws; the docstring of `gates.py` says what they do."""

from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import DEFAULT, GUMBEL, SHADOW, AnomalyKind
from vllm_gumbel.metrics.exactness import State, overall, poisson_tails, verdicts
from vllm_gumbel.rollout.counts import ArmCounts
from vllm_gumbel.rollout.exact import binomial_tail, least_count, mean_that_shows
from vllm_gumbel.rollout.results import FLAGS, Outcome, Question, Result, compare, judged, shown_share

#: Tokens below which two arms' frequencies differ by chance as much as limits are.
LEAST_FREQUENCIES = 100_000
#: Chance of a share of requests as far from the fraction, below which that is pointed at.
ODD_SHARE = 1e-6


def traffic(question: Question, arm: str) -> Result:
    """Return whether an arm draws at all, and, for gumbel, as many requests as it should."""
    counted = question.window.counted
    if arm == SHADOW:
        drawn = counted.total(catalogue.SHADOW_TOKENS)
        return Result(f"{arm} traffic", Outcome.PASS if drawn else Outcome.UNKNOWN, f"{drawn:,.0f} tokens")
    mine, all_arms = (counted.total(catalogue.REQUESTS, **labels) for labels in ({"arm": arm}, {}))
    says = f"{mine:,.0f} of {all_arms:,.0f} requests"
    if not mine or not counted.total(catalogue.SAMPLED_TOKENS, arm=arm):
        return Result(f"{arm} traffic", Outcome.UNKNOWN, f"{says}: nothing to judge")
    says += f" ({mine / all_arms:.2%})"
    if question.fraction is not None and all_arms:
        k, n = round(mine), round(all_arms)
        at_most = binomial_tail(n - k, n, 1 - question.fraction)
        if 2 * min(at_most, binomial_tail(k, n, question.fraction)) < ODD_SHARE:
            says += f", not {question.fraction:.2%}: do requests choose their arm, or share a gumbel_rollout_key?"
    return Result(f"{arm} traffic", Outcome.PASS, says)


def frequency(question: Question, arm: str, kind: AnomalyKind) -> Result:
    """Return whether an arm has more anomalies of a kind than its reference."""
    gate = f"{arm} {kind}"
    mine = ArmCounts.of(question.window.counted, arm)
    trials = mine.watched if kind is AnomalyKind.IMPROBABLE else mine.tokens
    units = "watched tokens" if kind is AnomalyKind.IMPROBABLE else "tokens"
    # vLLM's own sampler does not know the tokenizer's size, so padded ids are seen in shadow only.
    whose = SHADOW if kind is AnomalyKind.PADDED_ID else DEFAULT
    theirs = ArmCounts.of(question.window.counted, whose)
    if whose == SHADOW or question.fraction == 1:
        theirs += question.earlier.get(whose, ArmCounts())
    others = theirs.watched if kind is AnomalyKind.IMPROBABLE else theirs.tokens
    if others <= 0 and kind in FLAGS:
        says = f"{shown_share(mine.kinds[kind], trials)} {units}; no {whose} arm to compare with, no fault of a sampler"
        return Result(gate, Outcome.SHOWN, says)
    if others <= 0 and kind is AnomalyKind.IMPROBABLE and trials > 0:
        return _improbable(question, gate, mine)
    return compare(
        gate,
        (mine.kinds[kind], trials),
        (theirs.kinds[kind], others),
        question,
        units=units,
        whose=f"{whose} arm",
        least_rise=question.limits.least_rise,
    )


def exactness(question: Question, arm: str) -> Result:
    """Return whether an arm draws by the model's distribution."""
    evidence = question.window.counted.evidence(arm)
    found = verdicts(evidence, question.rate)
    state = overall(found)
    if state is State.INEXACT:
        which = [verdict for verdict in found if verdict.state is State.INEXACT]
    elif state is State.UNKNOWN:
        which = [verdict for verdict in found if verdict.essential and verdict.state is State.UNKNOWN]
    else:
        which = []
    p = min((verdict.p_value for verdict in found if verdict.p_value is not None), default=None)
    reasons = "; ".join(f"{verdict.test}: {verdict.says}" for verdict in which) or "drawn by their distribution"
    outcome = {State.EXACT: Outcome.PASS, State.INEXACT: Outcome.FAIL, State.UNKNOWN: Outcome.UNKNOWN}[state]
    return Result(f"{arm} exactness", outcome, f"{evidence.tested:,.0f} tested tokens; {reasons}", p, found[0].rate)


def divergence(question: Question) -> Result:
    """Return whether the token frequencies are as near to their reference's as they should be."""
    gate, limit = f"{GUMBEL} frequencies", question.limits.kl
    found = question.window.shown.series(catalogue.TOKEN_FREQUENCY_KL, arm=GUMBEL)
    if not found:
        return Result(gate, Outcome.SHOWN, "no KL: an arm or profile with 1,000 tokens to compare with is missing")
    worst, reference = max((value, labels.get("reference", "?")) for labels, value in found)
    says = f"KL {worst:.4f} nats from {reference} since the server's start"
    if limit is None:
        return Result(gate, Outcome.SHOWN, f"{says}; no limit is set")
    if worst <= limit:
        return Result(gate, Outcome.PASS, f"{says}, limit {limit:g}")
    drawn = question.window.counted.total(catalogue.SAMPLED_TOKENS, arm=GUMBEL)
    if drawn < LEAST_FREQUENCIES:
        return Result(gate, Outcome.UNKNOWN, f"{says}, limit {limit:g}; {drawn:,.0f} tokens can differ so by chance")
    return Result(gate, Outcome.FAIL, f"{says}, limit {limit:g}")


def agreement(question: Question) -> Result:
    """Return how many tokens shadow drew like the default arm: all of them with its noise, by chance else."""
    drawn, agree = (
        question.window.counted.total(catalogue.SHADOW_TOKENS, **labels) for labels in ({}, {"result": "agree"})
    )
    says = f"{agree:,.0f} of {drawn:,.0f} tokens are those that were sent"
    return Result(f"{SHADOW} agreement", Outcome.SHOWN, says)


def _improbable(question: Question, gate: str, mine: ArmCounts) -> Result:
    """Return whether more improbable tokens were drawn than the distributions say, where no arm is there to compare."""
    arm = gate.split()[0]
    seen = round(mine.kinds[AnomalyKind.IMPROBABLE])
    expected = question.window.counted.total(catalogue.EXPECTED_IMPROBABLE, arm=arm)
    tolerated = question.limits.ratio * expected
    finds = mean_that_shows(least_count(question.rate, lambda k: poisson_tails(k, tolerated)[1])) / mine.watched
    says = f"{shown_share(seen, mine.watched)} watched tokens; an exact sampler {shown_share(expected, mine.watched)}"
    p = poisson_tails(seen, tolerated)[1]
    return judged(gate, says, p, question.rate, finds, finds - expected / mine.watched, question.limits.least_rise)
