"""`vllm-gumbel check`: a real page of real counters on loopback, read, judged, told in words, JSON and exit codes."""

import contextlib
import json
import socket
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.metrics_page import Page, serving_page
from vllm_gumbel import check
from vllm_gumbel.cli import main
from vllm_gumbel.metrics import catalogue, scrape
from vllm_gumbel.metrics.evidence import PIT_BINS
from vllm_gumbel.metrics.exactness import Evidence
from vllm_gumbel.metrics.scrape import ScrapeError, fetch, page_address, parse

ADDRESS = "http://127.0.0.1:1/metrics"


def evidence(tested=20_000.0, z=0.4, uneven=9):
    """Return evidence of 2 nats^2 of variance a token, whose z of the law and unevenness of scores are given."""
    pit = tuple(float(count) for count in tested / PIT_BINS + np.resize([uneven, -uneven], PIT_BINS))
    return Evidence(
        watched=tested,
        tested=tested,
        surprisal=2 * tested + z * (2 * tested) ** 0.5,
        entropy=2 * tested,
        variance=2 * tested,
        pit=pit,
        score_squares=tested,
        score_step_squares=tested + 100,
        score_pairs=10 * tested,
    )


EXACT, HOT, FEW = evidence(), evidence(z=30), evidence(500.0)
STOCK = replace(EXACT, pit=(), score_squares=0.0, score_step_squares=0.0, score_pairs=0.0)


def page_of(*parts):
    """Return a page of our arm; one token in 8 is tested."""
    page = Page()
    for part in parts:
        page.add(part, drawn=8 * part.tested)
    return page


def checked(capsys, *arguments):
    """Run the command and return exit code, standard output and standard error."""
    code = main(["check", *arguments])
    return code, *capsys.readouterr()


@pytest.fixture
def while_waiting(monkeypatch):
    """Replace the command's waiting by the acts that are given, one a wait."""

    def replace_sleep(*acts):
        left = list(acts)
        monkeypatch.setattr(check, "time", SimpleNamespace(sleep=lambda seconds: left.pop(0)()))

    return replace_sleep


def stop():
    raise KeyboardInterrupt


def test_exact_server_exits_0_and_says_how_far_that_is_known(capsys):
    with serving_page(page_of(EXACT)) as served:
        code, out, err = checked(capsys, served.url)
    assert (code, err) == (0, "")
    assert f"{served.url}/metrics, everything counted since the server started" in out
    assert "arm gumbel draws exactly as far as 20,000 tested tokens can tell (12.5% of those drawn)" in out
    assert "z = 0.40; p = 0.7, not exact below 2.5e-07" in out
    assert "chi-square 1.6 of 19 degrees of freedom over 20,000 scores; p = 1, not exact below 2.5e-07" in out
    assert "correlate by 0.00050 over 200,000 pairs" in out
    assert "0 of 20,000 watched tokens outside what the filters keep" in out
    assert "a temperature wrong by 5%        by now" in out
    assert "a temperature wrong by 1%        in 287,4" in out
    assert out.endswith("An exact server is called not exact with a chance of 1e-06 at most, all tests together.\n")


@pytest.mark.parametrize(
    ("wrong", "test"),
    [
        (HOT, "law"),
        (evidence(uneven=100), "scores"),
        (replace(EXACT, score_step_squares=80_000.0), "rows"),
        (replace(EXACT, improbable=9.0, improbable_expected=0.1), "improbable"),
        (replace(EXACT, outside_filter=1.0), "outside_filter"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_server_that_is_not_exact_exits_1_and_names_the_test(wrong, test, capsys):
    with serving_page(page_of(wrong)) as served:
        code, out, _ = checked(capsys, served.url)
    assert code == 1
    assert f"arm gumbel does NOT draw exactly, as 20,000 tested tokens show: {test} (12.5%" in out


@pytest.mark.parametrize(
    ("little", "words"),
    [
        (FEW, "arm gumbel: unknown, 500 tested tokens are too few (12.5% of those drawn)"),
        (Evidence(watched=500.0, pit=(0.0,) * PIT_BINS), "only random draws of requests without a seed can be tested"),
        (Evidence(), "no token was watched (no traffic, or the server's setting `watch` is 0)"),
    ],
    ids=["few", "seeded", "none"],
)
def test_too_little_traffic_exits_3_and_says_why(little, words, capsys):
    with serving_page(page_of(little)) as served:
        code, out, _ = checked(capsys, served.url)
    assert code == 3
    assert words in out


def test_arms_are_judged_apart_and_share_alpha(capsys):
    page = page_of(EXACT)
    page.add(replace(STOCK, surprisal=HOT.surprisal), drawn=160_000, arm="default")
    with serving_page(page) as served:
        code, out, _ = checked(capsys, served.url)
        assert code == 1
        assert "arm gumbel draws exactly" in out
        assert "arm default does NOT draw exactly" in out
        assert out.count("not exact below 1.2e-07") == 6
        assert "the sampler of this arm does not say with which score a token won" in out
        code, out, _ = checked(capsys, served.url, "--arm", "gumbel")
        assert (code, out.count("arm default")) == (0, 0)
        code, out, err = checked(capsys, served.url, "--arm", "shadow")
        assert (code, out) == (2, "")
        assert "has no arm 'shadow', only gumbel, default" in err


@pytest.mark.parametrize(("stock", "code"), [(Evidence(), 0), (replace(FEW, pit=()), 3), (STOCK, 0)])
def test_arm_without_traffic_is_left_out_and_one_with_little_makes_the_server_unknown(stock, code, capsys):
    page = page_of(EXACT)
    page.add(stock, arm="default")
    with serving_page(page) as served:
        assert checked(capsys, served.url)[0] == code


def test_engines_are_added():
    """Two that are each within chance by the same side are not, together; models are added too."""
    page = page_of(EXACT)
    page.add(HOT, engine="1")
    with serving_page(page) as served:
        assert fetch(served.url).evidence("gumbel") == EXACT + HOT


def test_window_leaves_out_what_came_before(while_waiting, capsys):
    page = page_of(HOT)
    with serving_page(page) as served:
        while_waiting(lambda: page.add(EXACT, drawn=160_000), lambda: None)
        code, out, _ = checked(capsys, served.url, "--seconds", "60")
        assert code == 0
        assert "what was counted in 0 s" in out
        assert "20,000 tested tokens can tell (12.5% of those drawn)" in out
        code, out, _ = checked(capsys, served.url, "--seconds", "60", "--since-start")
        assert code == 1
        assert "everything counted since the server started" in out


@pytest.mark.parametrize("options", [("--seconds", "1"), ("--seconds", "1", "--since-start")], ids=str)
def test_restart_of_the_server_is_seen_and_what_came_before_left_out(options, while_waiting, capsys):
    with serving_page(page_of(HOT, HOT)) as served:
        while_waiting(lambda: setattr(served, "page", page_of(EXACT)))
        code, out, err = checked(capsys, served.url, *options)
    assert code == 0
    assert "everything counted since the server started anew" in out
    assert "the server has restarted; what it counted before is left out" in err


def test_restart_is_seen_by_the_process_too_when_it_has_counted_more_already():
    start = "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {}\n"
    first = parse(page_of(EXACT).text().decode() + start.format(1), ADDRESS)
    later = page_of(EXACT, EXACT).text().decode()
    assert not parse(later + start.format(1), ADDRESS).restarted_since(first)
    assert parse(later + start.format(2), ADDRESS).restarted_since(first)


def test_watching_goes_on_until_something_is_not_exact(while_waiting, capsys):
    """Each look has less of alpha: 1/2, 1/6, 1/12, a quarter of which is each test's; a look in vain is said."""
    page = page_of(HOT)
    with serving_page(page) as served:
        while_waiting(
            lambda: page.add(FEW),
            lambda: page.add(EXACT),
            lambda: setattr(served, "page", 503),
            lambda: setattr(served, "page", page) or page.add(HOT),
        )
        code, out, err = checked(capsys, served.url, "--watch", "--json")
    looks = [json.loads(line) for line in out.splitlines()]
    assert [look["state"] for look in looks] == ["unknown", "exact", "not exact"]
    assert [look["arms"][0]["evidence"]["tested"] for look in looks] == [500, 20_500, 40_500]
    rates = [look["arms"][0]["verdicts"][0]["rate"] for look in looks]
    assert rates == pytest.approx([1e-6 / 4 / split for split in (2, 6, 12)])
    assert "answers 503 Service Unavailable; looking again" in err
    assert code == 1


def test_server_that_is_gone_at_the_end_of_a_window_exits_3(while_waiting, capsys):
    with serving_page(page_of(EXACT)) as served:
        while_waiting(lambda: setattr(served, "page", 503), stop)
        code, out, err = checked(capsys, served.url, "--seconds", "60")
    assert (code, out) == (3, "")
    assert "answers 503 Service Unavailable" in err


def test_watching_is_interrupted_with_130(while_waiting, capsys):
    with serving_page(page_of(EXACT)) as served:
        while_waiting(stop)
        assert checked(capsys, served.url, "--watch")[0] == 130


def test_json_has_everything_in_one_line(capsys):
    with serving_page(page_of(EXACT)) as served:
        code, out, _ = checked(capsys, served.url, "--json", "--alpha", "0.001")
    report = json.loads(out)
    arm = report["arms"][0]
    assert (code, report["state"], report["alpha"], arm["arm"]) == (0, "exact", 0.001, "gumbel")
    assert [verdict["test"] for verdict in arm["verdicts"]] == ["law", "scores", "rows", "improbable", "outside_filter"]
    assert arm["verdicts"][0]["statistic"] == pytest.approx(0.4)
    assert arm["needed"]["a temperature wrong by 1%"] > 100_000
    assert out.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("ftp://127.0.0.1",),
        ("http://",),
        ("http://127.0.0.1:99999",),
        ("http://user:word@127.0.0.1",),
        ("http://127.0.0.1/a b",),
        ("",),
        (ADDRESS, "--seconds", "0"),
        (ADDRESS, "--seconds", "nan"),
        (ADDRESS, "--seconds", "inf"),
        (ADDRESS, "--seconds", "soon"),
        (ADDRESS, "--alpha", "0"),
        (ADDRESS, "--alpha", "1"),
        (ADDRESS, "--alpha", "nan"),
        (),
    ],
    ids=str,
)
def test_wrong_usage_exits_2(arguments, capsys):
    with pytest.raises(SystemExit) as exited:
        main(["check", *arguments])
    assert exited.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/metrics"),
        ("127.0.0.1:8000/", "http://127.0.0.1:8000/metrics"),
        ("localhost", "http://localhost/metrics"),
        ("https://[::1]:8000/inner/metrics?x=1#top", "https://[::1]:8000/inner/metrics?x=1"),
    ],
)
def test_address_of_the_server_is_enough(given, address):
    assert page_address(given) == address


TEXT = page_of(EXACT).text()
SUM = b'vllm_gumbel_entropy_nats_total{arm="gumbel",engine="0",model_name="m"}'


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (404, "answers 404 Not Found"),
        (500, "answers 500"),
        (b"<html><body>Not what you want</body></html>\n", "not in Prometheus' text format"),
        (b"", "no vllm_gumbel_ metrics there"),
        (b"vllm:num_requests_running 3\n", "no vllm_gumbel_ metrics there; is it a vLLM server with --sampler gumbel"),
        (TEXT[: TEXT.index(SUM) + 20] + b"\n", "not in Prometheus' text format"),
        (TEXT[: TEXT.index(SUM) + len(SUM) + 3], "ends within a line"),
        (TEXT.replace(SUM + b" 40000.0", SUM + b" NaN"), "entropy_nats_total{'arm': 'gumbel', 'engine': '0', 'model_"),
        (TEXT.replace(SUM + b" 40000.0", SUM + b" -1.0"), "is -1.0, which nothing counts to"),
        (TEXT.replace(SUM + b" 40000.0", SUM + b" +Inf"), "is inf, which nothing counts to"),
        (TEXT.replace(SUM + b" 40000.0", SUM + b" many"), "not in Prometheus' text format"),
        (b"\xff\xfe", "not text"),
    ],
    ids=[
        "404",
        "500",
        "HTML",
        "empty",
        "vLLM alone",
        "cut name",
        "cut number",
        "NaN",
        "negative",
        "infinite",
        "word",
        "bytes",
    ],
)
def test_bad_page_exits_3_and_names_address_and_reason(page, reason, capsys):
    assert SUM + b" 40000.0" in TEXT
    with serving_page(page) as served:
        code, out, err = checked(capsys, served.url)
    assert (code, out) == (3, "")
    assert err.startswith(f"vllm-gumbel check: {served.url}/metrics: ")
    assert reason in err
    assert err.count("\n") == 1


def test_page_that_is_cut_short_on_the_way_is_refused(monkeypatch):
    """Also where the cut leaves a page that could be read."""
    with serving_page(TEXT) as served:
        served.announced = len(TEXT) + 1
        with pytest.raises(ScrapeError, match=rf"ends after {len(TEXT)} of {len(TEXT) + 1} bytes"):
            fetch(served.url)
        monkeypatch.setattr(scrape, "LARGEST_PAGE", 100)
        with pytest.raises(ScrapeError, match="larger than"):
            fetch(served.url)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "no answer within 0.2 s"),
        (b"SSH-2.0-OpenSSH\r\n", "SSH-2.0-OpenSSH"),
        (b"", "closed connection without response"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nvllm", "closed the connection within the page"),
    ],
    ids=["silent", "no HTTP", "hangs up", "hangs up within the page"],
)
def test_server_of_another_kind_is_refused(answer, reason):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def once():
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                if answer is None:
                    connection.recv(1)
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=once, daemon=True)
        thread.start()
        with pytest.raises(ScrapeError, match=reason):
            fetch(f"127.0.0.1:{listening.getsockname()[1]}", timeout=0.2 if answer is None else 10)
        thread.join()


def test_closed_port_exits_3(capsys):
    with serving_page(TEXT) as served:
        url = served.url
    code, out, err = checked(capsys, url)
    assert (code, out, err) == (3, "", f"vllm-gumbel check: {url}/metrics: connection refused: nothing listens there\n")


@given(st.one_of(st.text(), st.text().map(lambda cut: TEXT.decode()[:3000] + cut)))
def test_any_text_is_read_or_refused_in_words(text):
    with contextlib.suppress(ScrapeError):
        assert parse(text, ADDRESS).arms() == ["gumbel"]


def test_page_read_within_a_step_is_read_again():
    """A step of one token, of which a page does not show the score yet; then pages that are whole, or not either."""
    torn = page_of(EXACT)
    torn.child(catalogue.TESTED_TOKENS).inc()
    with serving_page([torn, page_of(EXACT)]) as served:
        assert fetch(served.url).evidence("gumbel") == EXACT
        assert served.asked == 2


def test_tokens_without_a_score_do_not_keep_a_page_from_being_read():
    """The page that disagrees least with itself is taken, of equal ones the latest."""
    page, torn = page_of(EXACT), page_of(EXACT)
    for each, unscored in ((page, 5), (torn, 9)):
        each.child(catalogue.TESTED_TOKENS).inc(unscored)
    later = page_of(EXACT)
    later.add(replace(FEW, tested=505.0))
    with serving_page([torn, page, torn, later]) as served:
        read = fetch(served.url).evidence("gumbel")
        assert (read.tested, sum(read.pit)) == (EXACT.tested + 505, EXACT.tested + 500)
        assert served.asked == scrape.TRIES
