"""`vllm-gumbel top`: rates between two looks and exactness since the start, of a real page, within 80 columns."""

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client import Gauge
from rich.console import Console

from tests.metrics_page import Page, serving_page
from tests.test_check import EXACT, HOT, STOCK, page_of
from vllm_gumbel import top
from vllm_gumbel.cli import main
from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import AnomalyKind
from vllm_gumbel.metrics.scrape import parse

ADDRESS = "http://127.0.0.1:1/metrics"


def busy_page():
    """Return a page with something in every metric that is shown."""
    page = page_of(EXACT)
    page.add(STOCK, drawn=160_000, arm="default")
    page.child(catalogue.REQUESTS).inc(300)
    page.child(catalogue.ANOMALOUS_TOKENS, kind=AnomalyKind.REPETITION).inc(8)
    page.child(catalogue.ANOMALOUS_TOKENS, kind=AnomalyKind.IMPROBABLE).inc(2)
    page.child(catalogue.EXPECTED_IMPROBABLE).inc(2)
    page.child(catalogue.TOKEN_FREQUENCY_KL, reference="default").set(0.01234)
    page.child(catalogue.FAULTS, part="loops").inc(3)
    for long_ago in range(20):
        page.child(catalogue.KEPT_TOKENS).observe(1)
        page.child(catalogue.TOKEN_RUN_LENGTH).observe(64)
        page.child(catalogue.SAMPLER_SECONDS).observe(long_ago)
    for name, value in (("vllm:num_requests_running", 12), ("vllm:num_requests_waiting", 5)):
        Gauge(name, "vLLM's own.", ["engine"], registry=page.registry).labels("0").set(value)
    return page


def later(page):
    """Count what is drawn between two looks: 4,000 tokens, 500 of them tested."""
    page.add(
        replace(
            EXACT,
            **{name: getattr(EXACT, name) / 40 for name in ("watched", "tested", "entropy", "variance")},
            surprisal=1_050.0,
            pit=tuple(count / 40 for count in EXACT.pit),
        ),
        drawn=4_000,
    )
    page.child(catalogue.REQUESTS).inc(5)
    for seconds in (0.25, 0.25):
        page.child(catalogue.SAMPLER_SECONDS).observe(seconds)
    for kept in (3, 40, 45, 50, 7000):
        page.child(catalogue.KEPT_TOKENS).observe(kept)
    for length in (1, 1, 1, 1, 1, 1, 1, 1, 3, 9):
        page.child(catalogue.TOKEN_RUN_LENGTH).observe(length)


def looks(page, act=later, seconds=2.0):
    """Return two looks at a page, between which something happens, so many seconds apart."""
    first = parse(page.text().decode(), ADDRESS)
    act(page)
    return first, replace(parse(page.text().decode(), ADDRESS), seconds=first.seconds + seconds)


def shown(now, before, width=80):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(top.view(now, before, 1e-6))
    return console.file.getvalue()


def cells(text):
    """Return label -> columns of a view; `anomalies` and the like are told apart by their indentation."""
    rows = [[part for part in line.split("  ") if part.strip()] for line in text.splitlines()]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows if row}


@pytest.fixture
def while_waiting(monkeypatch):
    """Replace the command's waiting by the acts that are given, one a wait; then it is interrupted."""

    def replace_sleep(*acts):
        left = list(acts)

        def sleep(seconds):
            if not left:
                raise KeyboardInterrupt
            left.pop(0)()

        monkeypatch.setattr(top, "time", SimpleNamespace(sleep=sleep, strftime=lambda form: "12:00:00"))

    return replace_sleep


def test_rates_are_those_between_two_looks():
    first, second = looks(busy_page())
    text = cells(shown(second, first))
    assert text["since the last look"] == ["gumbel", "default"]
    assert text["tokens/s"] == ["2,000.0", "0.0"]
    assert text["requests/s"] == ["2.50", "0.00"]
    assert text["time in the sampler"] == ["25.0%", "-"]
    assert text["mean entropy"] == ["2.000 nats", "-"]
    assert text["mean surprisal"] == ["2.100 nats", "-"]
    assert text["kept ids, median"] == ["up to 50", "-"]
    assert text["runs, longer than 3"] == ["mean 2.00, 10.00%", "-"]


def test_exactness_and_anomalies_are_those_since_the_start():
    text = cells(shown(parse(busy_page().text().decode(), ADDRESS), None))
    assert text["since the start"] == ["gumbel", "default"]
    assert text["tokens"] == ["160,000", "160,000"]
    assert text["draws"] == ["exactly", "exactly"]
    assert text["law"] == ["z 0.40, p 0.7", "z 0.40, p 0.7"]
    assert text["scores"] == ["chi2 1.6, p 1", "-"]
    assert text["rows"] == ["r 0.00050, p 1", "-"]
    assert text["repetition"] == ["50.0", "0"]
    assert text["improbable"] == ["100.0", "0"]
    assert text["KL of frequencies"] == ["default 0.0123", "-"]
    assert text["faults"] == ["3", "0"]
    assert "tokens/s" not in text


def test_head_says_who_draws_and_how_long_the_queue_is():
    first, second = looks(busy_page())
    head = shown(second, first)
    assert "2.0 s after the last look" in head
    assert "vllm-gumbel 0.1.0, noise 1, backend numba, runner v1, vLLM 0.32.0\n" in head
    assert "requests: 12 running, 5 waiting\n" in head
    assert "rollout" not in head, "everything is drawn by the gumbel arm"


def test_head_says_how_far_a_rollout_is_and_that_a_breaker_is_open():
    page = busy_page()
    state = {catalogue.ROLLOUT_FRACTION: 0.05, catalogue.ROLLOUT_SHADOW: 1.0, catalogue.BREAKER_OPEN: 0.0}
    for metric, value in state.items():
        page.child(metric).set(value)
    assert "rollout: fraction 0.05, shadow 1\n" in shown(parse(page.text().decode(), ADDRESS), None)
    page.child(catalogue.BREAKER_OPEN).set(1)
    assert "THE BREAKER IS OPEN" in shown(parse(page.text().decode(), ADDRESS), None)
    assert "requests: " not in shown(parse(Page().text().decode(), ADDRESS), None)


def test_time_in_the_sampler_is_a_mean_over_engines():
    page = busy_page()
    page.child(catalogue.SAMPLER_SECONDS, engine="1").observe(0)
    first, second = looks(page)
    assert cells(shown(second, first))["time in the sampler"] == ["12.5%", "-"]


def test_drift_is_shown():
    page = busy_page()
    page.add(HOT)
    assert cells(shown(parse(page.text().decode(), ADDRESS), None))["draws"] == ["not exact", "exactly"]


@pytest.mark.parametrize("page", [busy_page(), Page(), page_of(HOT)], ids=["busy", "fresh", "one arm"])
def test_view_fits_in_80_columns(page):
    first, second = looks(page)
    for text in (shown(second, first), shown(first, None)):
        assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
        assert "…" not in text


def test_kept_ids_above_all_bounds_have_no_number():
    first, second = looks(Page(), lambda page: page.child(catalogue.KEPT_TOKENS).observe(150_000))
    assert cells(shown(second, first))["kept ids, median"] == ["above 100,000"]


def test_once_shows_one_view_and_ends(while_waiting, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = busy_page()
    with serving_page(page) as served:
        while_waiting(lambda: later(page))
        assert main(["top", served.url, "--once"]) == 0
    out, err = capsys.readouterr()
    assert (out.count("since the last look"), err) == (1, "")
    assert max(len(line) for line in out.splitlines()) <= 80


def test_once_without_an_answer_exits_1(while_waiting, capsys):
    while_waiting()
    with serving_page(404) as served:
        assert main(["top", served.url, "--once"]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"vllm-gumbel top: {served.url}/metrics: the server answers 404 Not Found\n")


def test_server_may_go_away_and_come_back_and_an_interrupt_exits_130(while_waiting, capsys):
    """What is no terminal gets a table each time; a restart is no negative rate."""
    page = busy_page()
    with serving_page(page) as served:
        while_waiting(
            lambda: later(page),
            lambda: setattr(served, "page", 503),
            lambda: setattr(served, "page", page_of(EXACT)),
            lambda: None,
        )
        assert main(["top", served.url]) == 130
    out = capsys.readouterr().out
    heads = [line for line in out.splitlines() if line.startswith(("since", "http"))]
    assert [line.split("  ")[0] for line in heads if line.startswith("since the") and "gumbel" in line] == [
        "since the start",
        "since the last look",
        "since the start",
        "since the last look",
    ]
    assert "answers 503 Service Unavailable; looking again every 2 s" in " ".join(out.split())
    assert "-" not in "".join(cells(out)["tokens/s"])


def test_terminal_gets_one_view_that_is_renewed(while_waiting, monkeypatch, capsys):
    """Rich moves the cursor up over the view before, and shows the cursor again at the end."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "60")
    page = busy_page()
    with serving_page(page) as served:
        while_waiting(lambda: later(page))
        assert main(["top", served.url]) == 130
    out = capsys.readouterr().out
    assert "\x1b[1A" in out
    assert out.rstrip().endswith("\x1b[?25h")


@pytest.mark.parametrize("arguments", [("ftp://h",), (ADDRESS, "--interval", "0"), (ADDRESS, "--interval", "nan"), ()])
def test_wrong_usage_exits_2(arguments):
    with pytest.raises(SystemExit) as exited:
        main(["top", *arguments])
    assert exited.value.code == 2
