"""Gates: what they say of counts that are known, and how often they fail arms that are equal."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from tests.control import RolloutPage, exact
from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import AnomalyKind
from vllm_gumbel.metrics.scrape import Scrape, parse
from vllm_gumbel.rollout.counts import ArmCounts, Latency, ServerCounts
from vllm_gumbel.rollout.gates import IGNORABLE, certain, judge, together
from vllm_gumbel.rollout.history import Target, Window
from vllm_gumbel.rollout.results import COMPARED, Limits, Outcome, Question, Result, compare

PASS, FAIL, UNKNOWN, SHOWN = Outcome.PASS, Outcome.FAIL, Outcome.UNKNOWN, Outcome.SHOWN
TARGET = Target("job server", scrapes=10, seconds=10.0, restarted=False, silent=None)


def page_of(fraction=0.5, shadow=0.0, ticks=10, slow=1.0):
    page = RolloutPage()
    for _ in range(ticks):
        page.add_traffic(fraction, shadow, slow)
    page.child(catalogue.ROLLOUT_FRACTION).set(fraction)
    page.child(catalogue.ROLLOUT_SHADOW, "shadow").set(shadow)
    page.child(catalogue.BREAKER_OPEN).set(0)
    return page


def window_of(page, *targets):
    read = parse(page.text().decode(), "http://p")
    return Window(0, 10, read, read, targets or (TARGET,))


BASELINE = ServerCounts.of(window_of(page_of(0.0)))


def asked_of(page, fraction=0.5, shadow=0.0, **changes):
    arms = ("gumbel",) * (fraction > 0) + ("shadow",) * (shadow > 0)
    question = Question(window_of(page), arms, 1e-3, fraction=fraction, shadow=shadow, baseline=BASELINE)
    return replace(question, **changes)


def said(question):
    return {result.gate: result for result in judge(question)}


def outcomes(question):
    return {gate: result.outcome for gate, result in said(question).items() if result.outcome is not PASS}


def test_equal_arms_pass_and_what_cannot_be_compared_is_shown():
    question = asked_of(page_of())
    shown = {"fallbacks", "throughput", "gumbel frequencies"}
    assert outcomes(question) == dict.fromkeys(shown | {"gumbel padded_id"}, SHOWN)
    assert together(judge(question)) is PASS
    found = said(question)["gumbel repetition"]
    assert found.says == "0 of 120,000 tokens; default arm 0 of 120,000"
    assert 0 < found.finds < 1e-3
    assert json.dumps([asdict(result) for result in judge(question)], allow_nan=False)


def test_shadow_is_compared_with_the_default_arm_and_its_flags_are_kept_for_later():
    page = page_of(0.0, 1.0)
    page.spoil(AnomalyKind.PADDED_ID, 40, "shadow")
    question = asked_of(page, 0.0, 1.0)
    assert together(judge(question)) is PASS
    assert set(outcomes(question)) == {"fallbacks", "throughput", "shadow agreement", "sampler_time"}
    earlier = {"shadow": ArmCounts.of(question.window.counted, "shadow")}
    later = page_of()
    later.spoil(AnomalyKind.PADDED_ID, 25)
    assert outcomes(asked_of(later)).get("gumbel padded_id") is SHOWN
    assert "gumbel padded_id" not in outcomes(asked_of(later, earlier=earlier))
    later.spoil(AnomalyKind.PADDED_ID, 50)
    assert outcomes(asked_of(later, earlier=earlier))["gumbel padded_id"] is FAIL


@pytest.mark.parametrize("kind", COMPARED["gumbel"][:5])
def test_anomalies_of_one_arm_fail_and_those_of_both_do_not(kind):
    page = page_of()
    page.spoil(kind, 30)
    assert outcomes(asked_of(page))[f"gumbel {kind}"] is FAIL
    assert together(judge(asked_of(page))) is FAIL
    page.spoil(kind, 30, "default")
    assert f"gumbel {kind}" not in outcomes(asked_of(page))


@pytest.mark.parametrize("kind", COMPARED["shadow"])
def test_anomalies_of_shadow_fail(kind):
    page = page_of(0.0, 1.0)
    page.spoil(kind, 60, "shadow")
    assert outcomes(asked_of(page, 0.0, 1.0))[f"shadow {kind}"] is FAIL


@pytest.mark.parametrize("arm", ["gumbel", "shadow"])
def test_one_token_outside_the_filters_fails_at_once(arm):
    fraction, shadow = (0.5, 0.0) if arm == "gumbel" else (0.0, 1.0)
    page = page_of(fraction, shadow)
    page.spoil(AnomalyKind.OUTSIDE_FILTER, 5, "default")
    assert FAIL not in outcomes(asked_of(page, fraction, shadow)).values()
    page.spoil(AnomalyKind.OUTSIDE_FILTER, 1, arm)
    question = asked_of(page, fraction, shadow)
    assert outcomes(question)[f"{arm} outside_filter"] is FAIL
    assert FAIL in [result.outcome for result in certain(question)]


def test_arm_without_default_traffic_is_compared_with_earlier_stages_or_what_is_expected():
    page = page_of(1.0)
    page.spoil(AnomalyKind.REPETITION, 12)
    alone = asked_of(page, 1.0)
    assert outcomes(alone)["gumbel repetition"] is UNKNOWN
    assert outcomes(alone)["gumbel glitch"] is UNKNOWN
    assert "an exact sampler 0 of" in said(alone)["gumbel improbable"].says
    earlier = {"default": ArmCounts(240_000.0, 30_000.0, {"repetition": 12.0})}
    assert "gumbel repetition" not in outcomes(replace(alone, earlier=earlier))
    page.spoil(AnomalyKind.REPETITION, 60)
    assert outcomes(asked_of(page, 1.0, earlier=earlier))["gumbel repetition"] is FAIL
    page.spoil(AnomalyKind.IMPROBABLE, 3)
    page.child(catalogue.EXPECTED_IMPROBABLE).inc(2)
    assert "gumbel improbable" not in outcomes(asked_of(page, 1.0))
    page.spoil(AnomalyKind.IMPROBABLE, 20)
    assert outcomes(asked_of(page, 1.0))["gumbel improbable"] is FAIL


def test_earlier_counts_are_left_out_while_the_default_arm_has_traffic():
    page = page_of()
    page.spoil(AnomalyKind.REPETITION, 30)
    earlier = {"default": ArmCounts(1e6, 1e5, {"repetition": 1e4})}
    assert outcomes(asked_of(page, earlier=earlier))["gumbel repetition"] is FAIL


@pytest.mark.parametrize(
    ("page", "gates"),
    [
        (page_of(ticks=0), {"gumbel traffic", "gumbel exactness", "gumbel repetition", "errors", "first_token"}),
        (page_of(0.0), {"gumbel traffic", "gumbel exactness", "gumbel repetition", "gumbel improbable"}),
        (page_of(0.001), {"gumbel repetition", "gumbel exactness", "gumbel glitch"}),
        (page_of(ticks=1), {"errors"}),
    ],
    ids=["none", "none in the arm", "little in the arm", "little"],
)
def test_too_little_traffic_is_unknown_and_never_a_pass(page, gates):
    fraction = 0.001 if gates == {"gumbel repetition", "gumbel exactness", "gumbel glitch"} else 0.5
    page.child(catalogue.ROLLOUT_FRACTION).set(fraction)
    question = asked_of(page, fraction)
    assert gates <= {gate for gate, outcome in outcomes(question).items() if outcome is UNKNOWN}
    assert together(judge(question)) is UNKNOWN


def test_tokens_that_are_not_drawn_exactly_fail():
    page = page_of()
    page.add(exact(1000, z=60))
    assert outcomes(asked_of(page))["gumbel exactness"] is FAIL
    assert "law: mean surprisal" in said(asked_of(page))["gumbel exactness"].says


def test_frequencies_have_a_limit_if_one_is_given():
    few, many = page_of(), page_of(ticks=20)
    for page in (few, many):
        page.child(catalogue.TOKEN_FREQUENCY_KL, reference="default").set(0.3)
    assert outcomes(asked_of(many))["gumbel frequencies"] is SHOWN
    assert outcomes(asked_of(many, limits=Limits(kl=0.2)))["gumbel frequencies"] is FAIL
    assert "gumbel frequencies" not in outcomes(asked_of(many, limits=Limits(kl=0.4)))
    short = page_of(ticks=5)
    short.child(catalogue.TOKEN_FREQUENCY_KL, reference="default").set(0.3)
    assert outcomes(asked_of(short, limits=Limits(kl=0.2)))["gumbel frequencies"] is UNKNOWN


def test_open_breaker_and_faults_fail_and_fallbacks_are_shown():
    page = page_of()
    page.child(catalogue.FALLBACKS, reason="kernel").inc(7)
    assert said(asked_of(page))["fallbacks"] == Result("fallbacks", SHOWN, "7 by kernel")
    page.child(catalogue.FAULTS, part="loops").inc()
    page.child(catalogue.BREAKER_OPEN).set(1)
    found = outcomes(asked_of(page))
    assert (found["faults"], found["breaker"]) == (FAIL, FAIL)
    assert outcomes(asked_of(page, arms=()))["faults"] is SHOWN
    assert outcomes(asked_of(page, window=replace(window_of(page), shown=Scrape("", 0, {}))))["breaker"] is UNKNOWN


def test_share_of_the_requests_that_is_not_the_fraction_is_pointed_at():
    page = page_of()
    assert said(asked_of(page))["gumbel traffic"].says == "500 of 1,000 requests (50.00%)"
    page.child(catalogue.ROLLOUT_FRACTION).set(0.05)
    odd = said(asked_of(page, 0.05))["gumbel traffic"]
    assert odd.outcome is PASS
    assert "not 5.00%: do requests choose their arm" in odd.says


def test_state_that_prometheus_does_not_show_is_unknown():
    found = said(asked_of(page_of(), 0.25, 1.0))
    assert (found["rollout_fraction"].outcome, found["rollout_fraction"].says) == (UNKNOWN, "0.5, asked for 0.25")
    assert found["rollout_shadow"].outcome is UNKNOWN
    unasked = replace(asked_of(page_of()), fraction=None)
    assert said(unasked)["rollout_fraction"] == Result("rollout_fraction", SHOWN, "0.5")


@pytest.mark.parametrize(
    "targets",
    [
        (),
        (TARGET, replace(TARGET, silent=99.0)),
        (replace(TARGET, scrapes=1),),
        (replace(TARGET, silent=99.0, dropped=True),),
    ],
    ids=["none", "silent", "once", "taken away"],
)
def test_server_that_is_not_scraped_is_unknown(targets):
    window = replace(window_of(page_of()), targets=targets)
    question = asked_of(page_of(), window=window)
    assert outcomes(question)["scraped"] is UNKNOWN
    assert together(judge(question)) is UNKNOWN


def test_one_server_of_several_may_be_taken_away():
    window = replace(window_of(page_of()), targets=(TARGET, replace(TARGET, silent=99.0, dropped=True)))
    assert said(asked_of(page_of(), window=window))["scraped"].says == "10 scrapes of 1 targets, 10 s; 1 more are gone"


def test_latency_fails_above_its_limit_unless_the_server_has_more_to_do():
    assert outcomes(asked_of(page_of(slow=1.1))) == outcomes(asked_of(page_of()))
    slow = outcomes(asked_of(page_of(slow=1.6)))
    assert (slow["first_token"], slow["next_token"]) == (FAIL, FAIL)
    lenient = asked_of(page_of(slow=1.6), limits=Limits(first_token=3, next_token=3))
    assert "next_token" not in outcomes(lenient)
    busy = asked_of(page_of(slow=1.6, ticks=13))
    assert outcomes(busy)["first_token"] is UNKNOWN
    assert "1.3 times as many requests" in said(busy)["first_token"].says
    assert outcomes(asked_of(page_of(slow=1.6), baseline=None))["first_token"] is SHOWN


def test_sampler_time_fails_only_if_it_is_longer_per_step_and_per_token():
    def after(steps, seconds, tokens):
        page = page_of(ticks=10)
        page.child(catalogue.SAMPLER_SECONDS).observe(seconds)
        for _ in range(steps):
            page.child(catalogue.SAMPLER_SECONDS).observe(0)
        page.child(catalogue.SAMPLED_TOKENS).inc(tokens)
        return outcomes(asked_of(page)).get("sampler_time")

    assert after(0, 0.0, 0) is None
    assert after(0, 0.2, 0) is FAIL
    assert after(200, 0.2, 0) is None
    assert after(0, 0.2, 240_000) is None


def test_errors_are_compared_with_the_baseline():
    page = page_of(ticks=20)
    page.http.labels("/v1/completions", "5xx", "POST").inc(60)
    assert outcomes(asked_of(page))["errors"] is FAIL
    same = ServerCounts.of(window_of(page))
    assert "errors" not in outcomes(asked_of(page, baseline=same, limits=Limits(least_error_rise=0.2)))
    assert outcomes(asked_of(page, baseline=same))["errors"] is UNKNOWN
    assert outcomes(asked_of(page, baseline=None))["errors"] is SHOWN


def test_gate_that_is_ignored_is_shown_with_what_it_says():
    page = page_of()
    page.spoil(AnomalyKind.REPETITION, 30)
    question = asked_of(page, limits=Limits(ignored=frozenset(["repetition"])))
    assert together(judge(question)) is PASS
    assert said(question)["gumbel repetition"].says.endswith("(fail, ignored)")
    names = {gate.split(" ", 1)[-1] for gate in said(asked_of(page_of(0.5, 1.0), 0.5, 1.0))}
    assert set(IGNORABLE) <= names


def test_nothing_known_is_no_pass():
    assert together([]) is UNKNOWN
    assert together([Result("a", SHOWN, "")]) is UNKNOWN
    assert together([Result("a", PASS, ""), Result("b", UNKNOWN, ""), Result("c", FAIL, "")]) is FAIL


def test_counts_survive_a_file():
    restored = ServerCounts.restored(json.loads(json.dumps(asdict(BASELINE))))
    assert restored == BASELINE
    assert restored.first_token.quantile(0.95) == pytest.approx(0.02, rel=0.3)


def test_quantile_is_that_of_prometheus():
    up_to = ((0.1, 10.0), (0.5, 90.0), (float("inf"), 100.0))
    assert Latency(30.0, 100.0, up_to).quantile(0.5) == pytest.approx(0.1 + 0.4 * 40 / 80)
    assert Latency(30.0, 100.0, up_to).quantile(0.95) == 0.5
    assert Latency(1.0, 10.0, ((0.1, 10.0),)).quantile(0.05) == pytest.approx(0.005)
    assert np.isnan(Latency().quantile(0.5))
    assert np.isnan(Latency().mean)


def test_equal_arms_fail_all_comparisons_together_no_more_often_than_alpha():
    """10,000 looks of 6 comparisons each at alpha 5%, rates equal and the ratio 1: the least lenient case.

    The bound is the count that a chance of 5% exceeds with one of 1e-6; 6.6% would be seen with a chance of 0.99.
    """
    generator, looks, alpha = np.random.default_rng(11), 10_000, 0.05
    tokens, others = 1_000, 9_000
    question = asked_of(page_of(), alpha=alpha, limits=Limits(ratio=1.0))
    rates = np.array([1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2])
    assert question.rate == alpha / (len(rates) + 2)
    first, second = (generator.poisson(rates * n, (looks, len(rates))) for n in (tokens, others))
    known: dict[tuple[int, int], bool] = {}

    def fails(k, m):
        if (k, m) not in known:
            found = compare("g", (k, tokens), (m, others), question, units="", whose="", least_rise=1.0)
            known[k, m] = found.outcome is FAIL
        return known[k, m]

    failed = sum(any(map(fails, *row)) for row in zip(first.tolist(), second.tolist(), strict=True))
    assert failed <= looks * alpha + 4.9 * (looks * alpha * (1 - alpha)) ** 0.5
    assert failed > 0
