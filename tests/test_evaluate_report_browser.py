"""Pages in a real browser: no error, no request, nothing wider than a phone, and colours that can be read."""

import json

import pytest

from tests import report_examples as examples
from tests.browser import browser, program
from tests.metrics_page import serving_page
from tests.test_evaluate_report import MAKERS
from vllm_gumbel.cli import main

KINDS = [*MAKERS, "server"]

#: Elements that stick out of the window, but for those that a table's own frame scrolls.
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') || e.matches('.scroll'))
    .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5 || e.getBoundingClientRect().left < -0.5)
    .map(e => `${e.tagName}.${e.getAttribute('class')}: ${e.textContent.trim().slice(0, 40)}`)"""
#: Contrast of every text with what lies below it, of those under 4.5 (WCAG 2.2, 1.4.3).
PALE = """(() => {
    const channels = text => text.match(/[\\d.]+/g).map(Number);
    const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const light = rgb => rgb.slice(0, 3).map(c => linear(c / 255))
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = e => { for (; e; e = e.parentElement) { const c = channels(getComputedStyle(e).backgroundColor);
        if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
    return [...document.querySelectorAll('body *')]
        .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) && !e.matches('title, desc'))
        .map(e => { const style = getComputedStyle(e);
            const [a, b] = [light(channels(e.matches('svg *') ? style.fill : style.color)), light(ground(e))].sort();
            return [e.textContent.slice(0, 30), (b + 0.05) / (a + 0.05)]; })
        .filter(([, contrast]) => contrast < 4.5);
})()"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """A running browser."""
    with browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The page of every kind, by kind."""
    folder, made = tmp_path_factory.mktemp("pages"), {}
    for kind, maker in MAKERS.items():
        source, made[kind] = folder / f"{kind}.json", folder / f"{kind}.html"
        source.write_text(json.dumps(maker()))
        assert main(["report", str(source), "--out", str(made[kind])]) == 0
    made["server"] = folder / "server.html"
    with serving_page(examples.server_page()) as served:
        assert main(["report", served.url, "--out", str(made["server"])]) == 0
    return made


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("kind", KINDS)
def test_page_opens_without_error_request_or_sideways_scrolling(kind, width, scheme, chromium, pages):
    chromium.open(pages[kind], width, scheme=scheme)
    assert chromium.value("document.querySelectorAll('details').forEach(e => { e.open = true; })") is None
    requests = [each["request"]["url"] for method, each in chromium.events if method == "Network.requestWillBeSent"]
    assert requests == [pages[kind].as_uri()]
    wrong = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
    assert [each for method, each in chromium.events if method in wrong] == []
    assert chromium.value("document.documentElement.scrollWidth <= innerWidth")
    assert chromium.value("innerWidth") == width
    assert chromium.value(TOO_WIDE) == []
    assert chromium.value(PALE) == []


def test_type_in_drawings_is_readable_on_a_phone(chromium, pages):
    chromium.open(pages["comparison"], 360)
    scale = "document.querySelector('svg.plot').getBoundingClientRect().width / 400"
    assert chromium.value(f"12 * {scale}") >= 9.5


def test_the_policy_forbids_what_might_slip_in(chromium, pages, tmp_path):
    page = tmp_path / "page.html"
    slipped = '<img src="http://127.0.0.1:9/x"><script>document.title = "obeyed"</script>'
    page.write_text(pages["study"].read_text().replace("<h1>", f"{slipped}<h1>"))
    chromium.open(page, 360)
    assert chromium.value("document.title") != "obeyed"
    blocked = [each["blockedReason"] for method, each in chromium.events if "blockedReason" in each]
    assert "csp" in blocked


def test_paper_cuts_no_table(chromium, pages):
    width = chromium.ask("Emulation.setEmulatedMedia", media="print")
    assert width == {}
    for kind in KINDS:
        chromium.open(pages[kind], 688)  # 182 mm, what A4 leaves between its margins
        chromium.ask("Emulation.setEmulatedMedia", media="print")
        assert chromium.value(TOO_WIDE.replace(".filter(e => !e.closest('.scroll') || e.matches('.scroll'))", "")) == []
    assert program()
