"""How shares, stages and durations are written, and what a server's endpoint is told and answers."""

import contextlib
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.control import KEY, controlled
from tests.metrics_page import serving_page
from vllm_gumbel.metrics.scrape import ScrapeError
from vllm_gumbel.rollout.client import Control, ControlError, State
from vllm_gumbel.rollout.stages import (
    Stage,
    StageError,
    parse_duration,
    parse_fraction,
    parse_stages,
    spoken,
)
from vllm_gumbel.rollout.web import base_address


def test_stages_are_percentages_in_order_with_shadow_where_it_says_so():
    found = parse_stages("0:shadow, 1,5:shadow,12.5,100")
    assert found == (Stage(0.0, 1.0), Stage(0.01), Stage(0.05, 1.0), Stage(0.125), Stage(1.0))
    assert [stage.name for stage in found] == ["0% with shadow", "1%", "5% with shadow", "12.5%", "100%"]
    assert [stage.arms for stage in found[:3]] == [("shadow",), ("gumbel",), ("gumbel", "shadow")]
    assert Stage(1.0, 1.0).arms == ("gumbel",)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty stage"),
        ("1,,5", "empty stage"),
        ("1,", "empty stage"),
        (":shadow", "empty stage"),
        ("nan", "'nan' is no percentage from 0 to 100"),
        ("inf", "no percentage"),
        ("-1", "no percentage"),
        ("101", "'101' is no percentage"),
        ("1e1", "no percentage"),
        ("5%", "no percentage"),
        ("5:ghost", "only `shadow` may follow the colon, got 'ghost'"),
        ("5:", "only `shadow`"),
        ("5:shadow:shadow", "only `shadow`"),
        ("0", "nothing of ours would draw"),
        ("1,1", "stage '1' is not above 1%"),
        ("5:shadow,5", "stage '5' is not above 5% with shadow"),
        ("5,1", "stage '1' is not above 5%"),
    ],
)
def test_bad_stages_are_refused_in_words(text, reason):
    with pytest.raises(StageError) as refused:
        parse_stages(text)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("text", "share"), [("0", 0.0), ("0.05", 0.05), ("5%", 0.05), ("1", 1.0), ("100%", 1.0), (" 2.5 % ", 0.025)]
)
def test_share_is_a_number_or_a_percentage(text, share):
    assert parse_fraction(text) == share


@pytest.mark.parametrize("text", ["", "%", "nan", "inf", "-0.1", "2", "5", "101%", "1e-2", "five", "1 2", "٣%"])
def test_bad_share_is_refused(text):
    with pytest.raises(StageError, match="share"):
        parse_fraction(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h", 3600), ("1h30m", 5400), ("2.5s", 2.5), ("168h", 604_800)]
)
def test_duration_has_units(text, seconds):
    assert parse_duration(text) == seconds
    assert parse_duration(spoken(seconds)) == seconds


@pytest.mark.parametrize("text", ["", " ", "10", "m", "0s", "-1s", "nan s", "10m1h", "10d", "169h", "1e2s"])
def test_bad_duration_is_refused(text):
    with pytest.raises(StageError, match="duration"):
        parse_duration(text)


@given(st.text(alphabet="0159.,:%shadowmnaif- e", max_size=12))
def test_any_text_is_read_or_refused(text):
    for parse in (parse_stages, parse_fraction, parse_duration):
        with contextlib.suppress(StageError):
            parse(text)
    with contextlib.suppress(StageError):
        assert all(0 <= stage.fraction <= 1 for stage in parse_stages(text))


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/metrics", "http://127.0.0.1:8000"),
        ("https://host/inner/?x=1", "https://host/inner"),
    ],
)
def test_address_of_a_server_has_no_slash_at_its_end(given, address):
    assert base_address(given) == address


def test_address_that_is_none_is_refused():
    with pytest.raises(ScrapeError, match="no address"):
        base_address("ftp://host")


def test_state_is_read_and_changed():
    with controlled() as server:
        control = Control(server.url, KEY)
        assert control.state() == State(0.0, 0.0, False, None, 1)
        assert control.change(fraction=0.05).fraction == 0.05
        assert control.change(shadow=1.0) == State(0.05, 1.0, False, None, 1) == control.state()
        assert server.changes == [(0.05, 0.0), (0.05, 1.0)]


@pytest.mark.parametrize(
    ("status", "reason", "passing"),
    [
        (401, "refuses the key", False),
        (403, "the server has no GUMBEL_ADMIN_KEY", False),
        (404, "name vllm_gumbel_rollout in the server's VLLM_PLUGINS", False),
        (400, "answers 400: 'not now'", False),
        (503, "answers 503: 'not now'", True),
        (307, "answers 307", False),
    ],
)
def test_refusal_names_address_and_reason_and_not_the_key(status, reason, passing):
    with controlled() as server:
        server.answers = [status]
        with pytest.raises(ControlError) as refused:
            Control(server.url, KEY).change(fraction=0.5)
    assert str(refused.value).startswith(f"{server.url}/gumbel/rollout: ")
    assert reason in str(refused.value)
    assert refused.value.passing is passing
    assert KEY not in str(refused.value)


def test_wrong_key_is_refused_and_stays_out_of_the_message():
    with controlled() as server, pytest.raises(ControlError, match="refuses the key") as refused:
        Control(server.url, "wrong-word").state()
    assert "wrong-word" not in str(refused.value)


@pytest.mark.parametrize("key", ["", "two words", "line\nbreak", "ключ"])
def test_key_that_cannot_be_sent_is_refused(key):
    with pytest.raises(ControlError, match="printable ASCII") as refused:
        Control("http://127.0.0.1:1", key)
    assert not key or key not in str(refused.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"<html>",
        b"[" * 100_000,
        b'{"fraction": 2, "shadow": 0, "breaker": {"open": false, "reason": null}, "workers": 1}',
        b'{"fraction": NaN, "shadow": 0, "breaker": {"open": false, "reason": null}, "workers": 1}',
        b'{"fraction": true, "shadow": 0, "breaker": {"open": false, "reason": null}, "workers": 1}',
        b'{"fraction": 1, "shadow": 0, "breaker": {"open": 0, "reason": null}, "workers": 1}',
        b'{"fraction": 1, "shadow": 0, "breaker": null, "workers": 1}',
        b'{"fraction": 1, "shadow": 0, "breaker": {"open": false, "reason": null}, "workers": "1"}',
    ],
    ids=range(11),
)
def test_answer_that_is_no_state_is_refused(content):
    with serving_page(content) as served:
        control = Control(served.url, KEY)
        control.address = f"{served.url}/metrics"
        with pytest.raises(ControlError, match="no state of a rollout") as refused:
            control.state()
    assert not refused.value.passing


def test_key_does_not_follow_a_redirect():
    """Another server that is pointed at is never asked."""
    asked = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:

        def redirect():
            connection, _ = first.accept()
            with connection:
                connection.recv(4096)
                target = f"http://127.0.0.1:{second.getsockname()[1]}/"
                connection.sendall(f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode())

        def listen():
            second.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                second.accept()
                asked.set()

        threads = [threading.Thread(target=target) for target in (redirect, listen)]
        for thread in threads:
            thread.start()
        with pytest.raises(ControlError, match="answers 302"):
            Control(f"http://127.0.0.1:{first.getsockname()[1]}", KEY).state()
        for thread in threads:
            thread.join()
    assert not asked.is_set()


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "closed"])
def test_server_that_does_not_answer_is_named(silent):
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    if not silent:
        listening.close()
    with contextlib.closing(listening), pytest.raises(ControlError) as refused:
        Control(url, KEY, timeout=0.2).state()
    reason = "no answer within 0.2 s" if silent else "connection refused: nothing listens there"
    assert str(refused.value) == f"{url}/gumbel/rollout: {reason}"
    assert refused.value.passing
