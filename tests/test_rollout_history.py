"""Counts of a window: raw samples added up exactly, by rules that are tested alone and through a real Prometheus."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.control import RolloutPage, exact
from tests.metrics_page import Page, serving_page
from tests.prometheus import prometheus, scraping
from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import AnomalyKind
from vllm_gumbel.rollout.history import _NAMES, GONE_AFTER, HistoryError, Prometheus, assemble, increase
from vllm_gumbel.rollout.web import ask

TOKENS, STARTED = "vllm_gumbel_sampled_tokens_total", "process_start_time_seconds"
TESTED, BINS = "vllm_gumbel_tested_tokens_total", "vllm_gumbel_score_pit_total"


def series(name, *points, **labels):
    return {"__name__": name, "job": "j", "instance": "i", "arm": "gumbel", **labels}, list(points)


def window(*all_series, began=0, ended=100):
    return assemble("http://p", began, ended, all_series)


def total(found, arm="gumbel"):
    return found.counted.total(catalogue.SAMPLED_TOKENS, arm=arm)


@given(st.lists(st.one_of(st.integers(0, 50), st.none()), min_size=1, max_size=20), st.integers(0, 100), st.booleans())
def test_increase_is_what_was_counted_whatever_the_resets(steps, start, from_zero):
    """Each step adds, or (None) the process dies and the next one has counted 3."""
    value, points, expected = start, [(0.0, float(start))], start if from_zero else 0
    restarts = []
    for when, step in enumerate(steps, 1):
        value, seen = (3, 3) if step is None else (value + step, step)
        if step is None:
            restarts.append(float(when))
        expected += seen
        points.append((float(when), float(value)))
    assert increase(points, from_zero, restarts) == expected


def test_fall_is_a_reset_without_a_process_to_know_it_by_and_rounding_is_none():
    assert increase([(0, 10.0), (1, 4.0), (2, 6.0)], False) == 6
    assert increase([(0, 10.0), (1, 10.0 * (1 - 1e-12)), (2, 11.0)], False) == pytest.approx(1)


def test_only_what_lies_between_the_first_and_the_last_scrape_counts():
    found = window(series(TOKENS, (-1, 1.0), (2, 10.0), (50, 11.0), (99, 15.0), (101, 99.0)))
    assert total(found) == 5
    assert found.seconds == 97
    assert [target.name for target in found.targets] == ["j i"]


def test_series_that_appears_counts_from_0_only_where_it_was_not_there_before():
    old = series(TOKENS, (1, 100.0), (2, 100.0), (3, 100.0))
    assert total(window(old)) == 0
    late = series(TOKENS, (2, 7.0), (3, 9.0), arm="default")
    assert total(window(old, late), "default") == 9
    assert total(window(late), "default") == 2
    elsewhere = series(TOKENS, (1, 1.0), (2, 1.0), (3, 1.0), instance="other")
    assert total(window(elsewhere, late), "default") == 2


def test_process_that_began_within_the_window_counts_from_0():
    started = series(STARTED, (10, 5.0), (11, 5.0))
    tokens = series(TOKENS, (10, 7.0), (11, 9.0))
    assert total(window(tokens, started)) == 9
    assert total(window(tokens, started, began=6)) == 2
    assert not window(tokens, started).restarted


def test_restart_is_seen_by_the_process_where_no_counter_falls():
    started = series(STARTED, (1, -5.0), (2, 1.5), (3, 1.5))
    found = window(series(TOKENS, (1, 10.0), (2, 40.0), (3, 41.0)), started)
    assert total(found) == 41
    assert found.restarted == ["j i"]
    late = window(series(TOKENS, (1, 10.0), (3, 41.0)), started)
    assert total(late) == 41
    assert window(series(TOKENS, (1, 10.0), (2, 4.0))).restarted == ["j i"]


def test_ends_are_scrapes_that_do_not_show_half_a_step():
    """Tested tokens run ahead of their scores at the first and the last scrape."""
    tested = series(TESTED, *((when, float(10 * when + (5 if when in (1, 12) else 0))) for when in range(1, 13)))
    bins = series(BINS, *((when, float(10 * when)) for when in range(1, 13)), bin="0")
    found = window(tested, bins)
    assert found.counted.total(catalogue.TESTED_TOKENS) == found.counted.total(catalogue.SCORE_PIT) == 90
    assert found.seconds == 9


def test_target_without_a_scrape_for_long_is_gone_and_its_gauges_are_not_shown():
    gauge = "vllm_gumbel_rollout_fraction"
    points = [(float(when), 0.5) for when in range(10)]
    here = window(series(gauge, *points), ended=9 + GONE_AFTER)
    assert here.targets[0].silent is None
    assert here.shown.total(catalogue.ROLLOUT_FRACTION) == 0.5
    gone = window(series(gauge, *points), ended=10 + GONE_AFTER)
    assert gone.targets[0].silent == 1 + GONE_AFTER
    assert gone.shown.total(catalogue.ROLLOUT_FRACTION) == 0
    dropped = window(series(gauge, *points[:5]), series(TOKENS, *points), ended=10)
    assert dropped.shown.samples == {}


def test_target_that_fails_is_told_from_one_that_was_taken_away():
    tokens = series(TOKENS, *((float(when), 1.0) for when in range(10)))
    tried = [series("up", *((float(when), float(when < 10)) for when in range(until))) for until in (100, 10)]
    failing, taken = (window(tokens, each).targets[0] for each in tried)
    assert (failing.scrapes, failing.silent, failing.dropped) == (10, 91, False)
    assert (taken.silent, taken.dropped) == (91, True)


def test_page_of_another_program_is_no_target():
    other = series(STARTED, (1, 0.5), instance="other")
    assert [target.name for target in window(other, series(TOKENS, (1, 1.0))).targets] == ["j i"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_counter_that_nothing_counts_to_is_refused(value):
    with pytest.raises(HistoryError, match=f"sampled_tokens_total of j i is {value}"):
        window(series(TOKENS, (1, 1.0), (2, value)))


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    """A page and the Prometheus that scrapes it every second."""
    folder = tmp_path_factory.mktemp("prometheus")
    with serving_page(RolloutPage()) as served, prometheus(folder, scraping(served.url)) as running:
        running.wait_for_scrape()
        yield served, running


def test_prometheus_has_every_count_once_over_a_restart_and_a_series_that_appears(scraped):
    """`increase()` of PromQL says something else of the same samples."""
    served, running = scraped
    history = Prometheus(running.url, ' {job="job0"}, ')
    began = history.time()
    served.page.add(exact(800), drawn=6400)
    served.page.spoil(AnomalyKind.REPETITION, 3)
    running.wait_for_scrape()
    served.page.http.labels("/v1/completions", "5xx", "POST").inc(2)
    served.page.http.labels("/health", "5xx", "GET").inc(50)
    running.wait_for_scrape()
    first = history.window(began, history.time())
    # The first scrape of the window may have come before what was counted above, or after.
    assert total(first) in (6400, 0)
    assert not first.restarted
    restarted = history.time()
    running.wait_for_scrape()
    served.page = RolloutPage()
    served.page.add(exact(80), drawn=9000)
    running.wait_for_scrape()
    served.page.add(exact(160), drawn=100)
    running.wait_for_scrape()
    found = history.window(restarted, history.time())
    assert total(found) == 9100
    assert found.counted.evidence("gumbel") == exact(80) + exact(160)
    assert found.restarted == [f"job0 {served.url.removeprefix('http://')}"]
    everything = history.window(began, history.time())
    assert sum(value for _, value in everything.counted.named("http_requests_total")) == 2
    extrapolated = running.value(f"sum(increase({TOKENS}[{int(history.time() - restarted)}s]))")
    assert extrapolated != total(found)


def test_prometheus_that_refuses_or_is_away_is_named(scraped):
    _, running = scraped
    with pytest.raises(HistoryError, match=r"answers 400 .*parse error") as refused:
        Prometheus(running.url, 'job=="x').window(0, 10)
    assert not refused.value.passing
    assert Prometheus(running.url, 'job="none"').window(time.time() - 5, time.time()).targets == ()
    with pytest.raises(HistoryError, match="connection refused: nothing listens there") as away:
        Prometheus("http://127.0.0.1:1").time()
    assert away.value.passing


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"<html>", "is it the address of a Prometheus"),
        (b"{}", "is it the address of a Prometheus"),
        (b'{"status": "success"}', "no result"),
        (b'{"status": "success", "data": {"resultType": "vector", "result": []}}', "no time|expected a matrix"),
        (b'{"status": "success", "data": {"resultType": "scalar", "result": []}}', "no time|expected a matrix"),
        (b'{"status": "success", "data": {"resultType": "matrix", "result": [{}]}}', "no time|series without samples"),
        (
            b'{"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {"__name__": "a"}, '
            b'"values": [[1, "word"]]}]}}',
            "no time|series without samples",
        ),
        (503, "answers 503"),
        (404, "answers 404"),
    ],
    ids=["HTML", "empty", "no data", "vector", "scalar", "no labels", "word", "503", "404"],
)
def test_answer_of_something_else_is_refused(content, reason, monkeypatch):
    with serving_page(content) as served:
        history = Prometheus(served.url)
        monkeypatch.setattr("vllm_gumbel.rollout.history.ask", lambda *_, **__: ask(f"{served.url}/metrics"))
        for act in (history.time, lambda: history.window(0, 10)):
            with pytest.raises(HistoryError, match=reason) as refused:
                act()
            assert str(refused.value).startswith(served.url)
            assert refused.value.passing is (content == 503)


def test_page_alone_has_everything_that_is_read():
    """Every counter that the window reads is a name of the catalogue or of vLLM's that the page of the tests has."""
    page = RolloutPage()
    page.add_traffic(0.5, 0.5)
    families = {line.split()[2] for line in page.text().decode().splitlines() if line.startswith("# TYPE")}
    bare = {name.rsplit("_", 1)[0] if name.endswith(("_sum", "_count", "_bucket")) else name for name in _NAMES}
    assert bare - {"up"} <= families
    assert isinstance(page, Page)
