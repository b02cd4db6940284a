"""`vllm-gumbel report`: a page of every kind, from real files and a real server; what is broken is refused in words."""

import json
import re
import stat

import pytest

from tests import report_examples as examples
from tests.metrics_page import Page, serving_page
from tests.report_examples import Reader
from vllm_gumbel.cli import main

MAKERS = {
    "comparison": examples.comparison,
    "verification": examples.verification,
    "rollout": examples.rollout,
    "study": examples.study,
}
#: Texts that a page must show and never obey.
HOSTILE = {
    "markup": "<script>alert(1)</script><img src=x onerror=alert(2)>",
    "attribute": '" onmouseover="alert(3)',
    "template": "{{ 7 * 7 }}{% for %}",
    "nul": "before\x00after\x1b[31m",
    "rtl": "\u202eevil \u05d0\u05d1\u05d2 \u0627\u0644\u0633\u0644\u0627\u0645",
    "emoji": "\U0001f600 \U0001f469\u200d\U0001f680",
    "surrogate": "lone \ud800 surrogate",
    "long": "x" * 100_000,
    "empty": "",
}


@pytest.fixture
def written(tmp_path, capsys):
    """Return a function that writes content, makes its page, and returns the HTML."""

    def write(content, *flags):
        source, out = tmp_path / "input.json", tmp_path / "page.html"
        source.write_text(json.dumps(content))
        code = main(["report", str(source), "--out", str(out), *flags])
        assert (code, capsys.readouterr().err) == (0, "")
        return out.read_text()

    return write


@pytest.fixture
def refused(tmp_path, capsys):
    """Return a function that asks for a page, and returns the message of the refusal; nothing may be written."""

    def refuse(source):
        out = tmp_path / "page.html"
        code = main(["report", str(source), "--out", str(out)])
        printed = capsys.readouterr()
        assert (code, printed.out, out.exists()) == (2, "", False)
        assert printed.err.count("\n") == 1
        return printed.err

    return refuse


@pytest.mark.parametrize("kind", MAKERS)
def test_page_is_whole_html_that_loads_nothing(kind, written):
    html = written(MAKERS[kind]())
    page = Reader(html)
    names = {tag for tag, _ in page.tags}
    assert {"html", "title", "h1", "table", "svg", "figure"} <= names
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a"}
    for tag, attributes in page.tags:
        assert not {"src", "href", "xlink:href", "srcset", "action", "data"} & attributes.keys(), tag
    style = html.split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:")


@pytest.mark.parametrize("kind", MAKERS)
def test_every_drawing_has_a_name_of_its_own_and_says_what_it_shows(kind, written):
    page = Reader(written(MAKERS[kind]()))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    plots = [attributes for tag, attributes in page.tags if tag == "svg" and attributes.get("class") == "plot"]
    assert plots
    for attributes in plots:
        assert attributes["role"] == "img"
        assert set(attributes["aria-labelledby"].split()) <= set(ids)
    assert all(a.get("aria-hidden") == "true" for t, a in page.tags if t == "svg" and a.get("class") != "plot")


def test_words_come_before_tables_and_drawings(written):
    html = written(examples.comparison())
    body = html.split("<body>")[1]
    assert body.index("What was found") < body.index("What this does not say") < body.index("<table")
    assert body.index("<table") < body.index('class="plot"')


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("kind", ["comparison", "verification", "rollout", "study"])
def test_texts_of_others_are_shown_and_never_obeyed(kind, name, written):
    hostile = HOSTILE[name]
    content = json.loads(json.dumps(MAKERS[kind](), ensure_ascii=True))
    content = _spoilt(content, hostile)
    page = Reader(written(content, "--title", "fine"))
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]", page.text)
    assert "49" not in page.text or name != "template" or "7 * 7" in page.text
    if name in ("markup", "attribute", "template", "rtl", "emoji"):
        assert hostile[:40] in page.text
    if name == "long":
        assert "(100,000 characters)" in page.text
        assert len(page.text) < 200_000


def _spoilt(content, text):
    """Return content with a text in every place where somebody else chose it."""
    keep = {"kind", "verdict", "outcome", "better", "version", "sampler"}
    if isinstance(content, dict):
        if "settings" in content:
            content = content | {"settings": {text: content["settings"]["greedy"]}}
        return {key: value if key in keep else _spoilt(value, text) for key, value in content.items()}
    if isinstance(content, list):
        return [_spoilt(each, text) for each in content]
    return text if isinstance(content, str) else content


def test_redaction_leaves_out_texts_and_tokens(written):
    secrets = ["sekret prompt", "sekret answer", "sekret token", "sekret words"]
    content = examples.comparison()
    content["examples"][0] |= {"prompt": secrets[0], "baseline": secrets[1], "candidate": secrets[1]}
    content["token_frequencies"]["tokens"][0][0] = secrets[2]
    content["failures"]["candidate"][0][1] = secrets[3]
    open_page, closed_page = written(content), written(content, "--redact")
    for secret in secrets:
        assert secret in open_page
        assert secret not in closed_page
    assert "94.5%" in closed_page
    content = examples.verification()
    for position in content["records"][4]["positions"]:
        position |= {"text": "sekret", "token": 987_654}
    assert "sekret" in written(content)
    closed_page = written(content, "--redact")
    assert "sekret" not in closed_page
    assert "987654" not in closed_page


def test_file_is_its_owners_alone_and_replaced_at_once(tmp_path, written):
    old = tmp_path / "page.html"
    old.write_text("old")
    old.chmod(0o644)
    held = old.open()
    written(examples.study())
    assert stat.S_IMODE(old.stat().st_mode) == 0o600
    assert held.read() == "old"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["input.json", "page.html"]


def test_title_is_the_one_given(written):
    page = Reader(written(examples.study(), "--title", "Ours <b>against</b> theirs"))
    assert page.text.count("Ours <b>against</b> theirs") == 2


@pytest.mark.parametrize(("name", "kind"), [("comparison.json", "comparison"), ("knobs.json", "study")])
def test_folder_is_recognised_by_what_it_holds(name, kind, tmp_path, capsys):
    folder, out = tmp_path / "results", tmp_path / "page.html"
    folder.mkdir()
    (folder / name).write_text(json.dumps(MAKERS[kind]()))
    assert main(["report", str(folder), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert {"comparison": "smollm2 in 4 bits", "study": "tail boost 0.25"}[kind] in out.read_text()


@pytest.mark.parametrize("path", ["", "/metrics"])
def test_page_of_a_live_server_shows_what_its_metrics_say(path, tmp_path):
    out = tmp_path / "page.html"
    with serving_page(examples.server_page()) as served:
        assert main(["report", served.url + path, "--out", str(out)]) == 0
    page = Reader(out.read_text())
    for words in ("arm gumbel and the arm default draw exactly", "20,000 tested tokens", "8 repetition", "arm 25% of"):
        assert words in page.text, words
    assert {"Winning scores of the arm gumbel", "Candidates left after the filters"} <= set(page.text.splitlines())


def test_server_that_does_not_draw_exactly_is_called_so(tmp_path):
    out = tmp_path / "page.html"
    page = examples.server_page()
    page.child(examples.catalogue.SURPRISAL).inc(30 * 200)
    with serving_page(page) as served:
        assert main(["report", served.url, "--out", str(out)]) == 0
    assert "The arm gumbel does not draw exactly." in Reader(out.read_text()).text


def test_server_without_traffic_makes_a_page_of_unknowns(tmp_path):
    out = tmp_path / "page.html"
    with serving_page(Page()) as served:
        assert main(["report", served.url, "--out", str(out)]) == 0
    assert "is not known yet" in Reader(out.read_text()).text


@pytest.mark.parametrize(
    ("page", "words"),
    [(404, "answers 404"), (b"x 1\n", "no vllm_gumbel_ metrics"), (b"\xff\xfe\n", "not text"), (b"{}\n", "format")],
)
def test_other_servers_are_refused_by_name(page, words, refused):
    with serving_page(page) as served:
        message = refused(served.url)
    assert words in message
    assert served.url in message


def test_server_that_is_away_is_refused(refused):
    with serving_page(Page()) as served:
        pass
    assert "connection refused" in refused(served.url)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no JSON"),
        ("{", "no JSON (Expecting property name"),
        ('{"kind": "comparison", ', "line 1, column"),
        ("[" * 100_000, "no JSON"),
        ("[]", "JSON of something else"),
        ("null", "JSON of something else"),
        ('{"kind": "poem"}', "JSON of something else"),
        ('{"kind": 7}', "JSON of something else"),
        ('{"settings": {}}', "JSON of something else"),
        (b"\xff\xfe\x00", "no JSON"),
    ],
    ids=str,
)
def test_file_of_something_else_is_refused_with_what_was_expected(content, words, tmp_path, refused):
    path = tmp_path / "input.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refused(path)
    assert str(path) in message
    assert words in message
    assert "expected the folder of `vllm-gumbel compare`" in message


@pytest.mark.parametrize(
    ("kind", "where", "value", "words"),
    [
        ("comparison", ("version",), 2, "field version"),
        ("comparison", ("pairs",), -1, "field pairs"),
        ("comparison", ("pairs",), "159", "field pairs"),
        ("comparison", ("pairs",), 10**400, "field pairs"),
        ("comparison", ("measures",), None, "field measures"),
        ("comparison", ("measures", 0, "difference"), float("nan"), "field measures.0.difference"),
        ("comparison", ("measures", 0, "low"), float("inf"), "field measures.0.low"),
        ("comparison", ("measures", 1, "kind"), "luck", "field measures.1.kind"),
        ("comparison", ("agreement", "share"), 1.5, "field agreement.share"),
        ("comparison", ("agreement", "curve", 2), [1, 0.5], "field agreement.curve.2"),
        ("comparison", ("token_frequencies", "tokens", 3, 1), -0.1, "field token_frequencies.tokens.3.1"),
        ("comparison", ("latency", "baseline"), [1.0], "baseline has 1 values of 5 quantiles"),
        ("comparison", ("baseline",), "smollm2", "field baseline"),
        ("verification", ("records", 3, "verdict"), "perhaps", "field records.3.verdict"),
        ("verification", ("records", 0, "positions", 2, "match"), 1, "field records.0.positions.2.match"),
        ("verification", ("alpha",), "small", "field alpha"),
        ("rollout", ("looks", 1, "results", 0, "outcome"), "maybe", "field looks.1.results.0.outcome"),
        ("rollout", ("looks",), {}, "field looks"),
        ("rollout", ("stages",), None, "field stages"),
        ("study", ("settings", "greedy", "kl_nats"), "much", "field settings.greedy.kl_nats"),
        ("study", ("settings",), {}, "field settings"),
    ],
)
def test_broken_results_are_refused_by_field(kind, where, value, words, tmp_path, refused):
    content = MAKERS[kind]()
    place = content
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    path = tmp_path / "input.json"
    path.write_text(json.dumps(content))
    assert words in refused(path)


def test_folder_without_results_says_what_makes_them(tmp_path, refused):
    folder = tmp_path / "results"
    folder.mkdir()
    assert "neither comparison.json (of vllm-gumbel compare) nor knobs.json" in refused(folder)
    (folder / "baseline.jsonl").touch()
    assert "the same command again does what is missing" in refused(folder)
    for name in ("comparison.json", "knobs.json"):
        (folder / name).write_text("{}")
    assert "name one of them" in refused(folder)


@pytest.mark.parametrize("source", ["nothing-there", "", "a\nb", "x" * 5000, "ftp://host/metrics", "http://"])
def test_source_that_is_not_there_is_refused(source, refused):
    message = refused(source)
    assert "address" in message
    assert len(message) < 600


def test_page_that_cannot_be_written_is_refused(tmp_path, capsys):
    source = tmp_path / "input.json"
    source.write_text(json.dumps(examples.study()))
    assert main(["report", str(source), "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("comparison", {"measures": [], "agreement": None, "by_task": {}, "examples": [], "notes": [], "pairs": 0}),
        ("comparison", {"token_frequencies": {"tokens": []}, "latency": None, "lengths": {}, "coupled": False}),
        ("comparison", {"agreement": {"tokens": 0, "agree": 0, "share": None, "low": None, "high": None, "curve": []}}),
        ("comparison", {"token_frequencies": {"tokens": [[1, 0.0, 0.0], [2, 0.0, 0.0]]}}),
        ("verification", {"records": []}),
        ("verification", {"records": [examples.verified(0, "matches", positions=[], evidence_for=None)]}),
        ("rollout", {"looks": [], "exit_code": None}),
        ("rollout", {"looks": [examples.look("baseline", 1, "unknown", -1e300)], "exit_code": 77}),
        ("study", {"settings": {"lone": {}}}),
        ("study", {"settings": {"lone": {"kl_nats": 0.0, "entropy_nats": 0.0, "mean_logprob": -1.0}}}),
    ],
)
def test_empty_results_make_a_page_all_the_same(kind, content, written):
    Reader(written(MAKERS[kind](**content)))


def test_long_results_make_a_page_that_still_opens(written):
    content = examples.verification()
    content["records"] = [record | {"id": f"{i}"} for i in range(50) for record in content["records"]]
    assert len(html := written(content)) < 3_000_000
    assert "700 rows more are not shown" in html
