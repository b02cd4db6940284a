"""Judges a stage of a rollout from what was counted in its window: pure functions, no input or output.

A gate passes, fails or is unknown; some only show a number. Too little traffic is unknown, never a pass: a gate that
compares frequencies passes only if it would have found, with chance 0.99, a rise of `Limits.least_rise`.

What is compared, and with which chance of a false alarm:

anomalies by kind: the arm against a reference, by the exact test of `exact.py`: does it have more than `Limits.ratio`
    times the rate? The reference is the default arm in the same window; where that gets no requests any more, with a
    fraction of 1, its counts of the earlier stages are added. vLLM's own sampler does not know the tokenizer's size, so
    padded_id is compared with the shadow arm, which sees the default arm's logits, also of earlier stages. What the
    draw flags in the logits (nonfinite_logits, no_candidate, padded_id) is no fault of a sampler, and only shown where
    there is nothing to compare with. Without any reference improbable is compared with what an exact sampler draws, the
    others are unknown. improbable is counted among watched tokens, the others among drawn ones; in shadow there is no
    repetition, since the text is not shadow's. outside_filter must be 0.
errors: the share of requests that end in one, against that of the baseline, by the same test.
exactness: `metrics.exactness`, on the window's evidence.

These share alpha equally (Bonferroni, `Question.rate`). The tests of frequencies take events to be independent: loops
are counted when they begin, so a text that stays in one is one event, but it may begin another; flags of one broken
request, the same request sent again with the same seed, and requests that fail together are many events at once, so a
gate may fail for one such burst with a larger chance than stated.

Limits without a chance: latencies against those of the baseline window depend on the load and on what is asked, and
requests wait for each other. Where the server has clearly more requests than in the baseline, a latency above its limit
is unknown. Time in the sampler is a + b rows for a step, so that load alone moves it per step and per token in opposite
directions: it fails only if both are above the limit. While shadow draws too it is only shown.
"""

from collections.abc import Sequence

from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import GUMBEL, SHADOW, AnomalyKind
from vllm_gumbel.rollout import arm_gates, server_gates
from vllm_gumbel.rollout.counts import ArmCounts, ServerCounts
from vllm_gumbel.rollout.results import COMPARED, Outcome, Question, Result

#: Names, without the arm, of the gates that may be told to decide nothing; not those that find that there is nothing to
#: judge, nor those that never fail by chance.
IGNORABLE = (
    *sorted({kind.value for kinds in COMPARED.values() for kind in kinds}),
    "exactness",
    "frequencies",
    "errors",
    "first_token",
    "next_token",
    "sampler_time",
)


def judge(question: Question) -> list[Result]:
    """Return what every gate says."""
    results = [server_gates.scraped(question), *server_gates.asked(question), *certain(question)]
    for arm in question.arms:
        results += [arm_gates.traffic(question, arm)]
        results += [arm_gates.frequency(question, arm, kind) for kind in COMPARED[arm]]
        results += [arm_gates.exactness(question, arm)]
    if GUMBEL in question.arms:
        results += [arm_gates.divergence(question)]
    if SHADOW in question.arms:
        results += [arm_gates.agreement(question)]
    now = ServerCounts.of(question.window)
    results += [
        server_gates.errors(question, now),
        *server_gates.latencies(question, now),
        server_gates.sampler(question, now),
        server_gates.throughput(question, now),
    ]
    return [_unless_ignored(result, question.limits.ignored) for result in results]


def certain(question: Question) -> list[Result]:
    """Return the gates that fail without a chance of a false alarm, so that they can be looked at at any time."""
    counted, shown = question.window.counted, question.window.shown
    results = []
    opened = [value for _, value in shown.series(catalogue.BREAKER_OPEN)]
    if not opened:
        results.append(Result("breaker", Outcome.UNKNOWN, f"no {catalogue.BREAKER_OPEN.exposed_name} in Prometheus"))
    else:
        says = f"open in {sum(value > 0 for value in opened)} of {len(opened)} engines"
        results.append(Result("breaker", Outcome.FAIL if any(opened) else Outcome.PASS, says))
    faults = counted.total(catalogue.FAULTS)
    parts = ", ".join(sorted({labels.get("part", "?") for labels, value in counted.series(catalogue.FAULTS) if value}))
    says = f"{faults:,.0f} errors of the sampler's own{f', in {parts}' if parts else ''}"
    outcome = Outcome.PASS if not faults else Outcome.FAIL if question.arms else Outcome.SHOWN
    results.append(Result("faults", outcome, says))
    fallbacks = {labels.get("reason", "?"): value for labels, value in counted.series(catalogue.FALLBACKS) if value}
    says = ", ".join(f"{value:,.0f} by {reason}" for reason, value in sorted(fallbacks.items())) or "none"
    results.append(Result("fallbacks", Outcome.SHOWN, says))
    for arm in question.arms:
        counts = ArmCounts.of(counted, arm)
        outside = counts.kinds[AnomalyKind.OUTSIDE_FILTER]
        outcome = Outcome.FAIL if outside else Outcome.PASS if counts.watched else Outcome.UNKNOWN
        says = f"{outside:,.0f} of {counts.watched:,.0f} watched tokens; must be 0"
        results.append(Result(f"{arm} outside_filter", outcome, says))
    return [_unless_ignored(result, question.limits.ignored) for result in results]


def together(results: Sequence[Result]) -> Outcome:
    """Return what all gates say: one that fails is enough, and all must be known to pass."""
    for outcome in (Outcome.FAIL, Outcome.UNKNOWN):
        if any(result.outcome is outcome for result in results):
            return outcome
    return Outcome.PASS if any(result.outcome is Outcome.PASS for result in results) else Outcome.UNKNOWN


def _unless_ignored(result: Result, ignored: frozenset[str]) -> Result:
    """Return a result that decides nothing if its gate is to be ignored."""
    names = {result.gate, result.gate.split(" ", 1)[-1]}
    if names & ignored and result.outcome is not Outcome.SHOWN:
        return Result(result.gate, Outcome.SHOWN, f"{result.says} ({result.outcome}, ignored)", result.p_value)
    return result
