"""How figures and texts that come from data are put into words: no rounding to certainty, nothing that a page obeys."""

import re
from collections.abc import Iterable

#: Characters of a name and of a text that are shown at most.
NAME_LIMIT, TEXT_LIMIT = 120, 1500

MINUS = "\N{MINUS SIGN}"
#: Between the bounds of an interval, which stay on one line.
TO = "\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}"
_SPELLED = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
#: Characters that no page should hold, but for tab and line feed; C0 controls have pictures of their own.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


def clean(text: str, limit: int = NAME_LIMIT) -> str:
    """Return a text with control characters made visible, cut to a limit with its full length stated.

    What is left may still be any markup: whoever puts it into a page escapes it.
    """
    shown = _CONTROLS.sub(_visible, text[:limit].replace("\r\n", "\n"))
    return shown if len(text) <= limit else f"{shown}\N{HORIZONTAL ELLIPSIS} ({len(text):,} characters)"


def number(value: float | None, digits: int = 3, signed: bool = False) -> str:
    """Return a number with so many significant digits; of a large one all before the point; a dash for None."""
    if value is None:
        return "\N{EN DASH}"
    size = float(f"{abs(value):.{digits}g}")
    if size and not 1e-4 <= size < 1e15:
        mantissa, exponent = f"{size:.{digits - 1}e}".split("e")
        text = f"{float(mantissa):g}e{int(exponent)}".replace("-", MINUS)
    elif size >= 10 ** (digits - 1):
        text = f"{abs(value):,.0f}"
    else:
        text = f"{size:.{digits}g}"
    return f"{MINUS if value < 0 else '+' if signed and value > 0 else ''}{text}"


def percent(share: float | None) -> str:
    """Return a share in percent, with as many digits as it takes not to call it 0 or all if it is not."""
    if share is None:
        return "\N{EN DASH}"
    if abs(100 * share - round(100 * share)) < 1e-9 and (share in (0, 1) or 0 < round(100 * share) < 100):
        return f"{100 * share:.0f}%"
    for digits in range(1, 9):
        text = f"{100 * share:.{digits}f}"
        if 0 < float(text) < 100:
            break
    return f"{text}%"


def interval(low: float | None, high: float | None) -> str:
    """Return two bounds in words; nothing if one is missing."""
    return "" if low is None or high is None else f"{number(low)}{TO}{number(high)}"


def share_interval(low: float | None, high: float | None) -> str:
    """Return two bounds in percent; nothing if one is missing."""
    return "" if low is None or high is None else f"{percent(low)}{TO}{percent(high)}"


def counted(count: int, one: str, many: str | None = None) -> str:
    """Return how many there are of something, in words."""
    return f"{spelled(count)} {one if count == 1 else many or one + 's'}"


def spelled(count: int) -> str:
    """Return a count, as a word if it is small."""
    return _SPELLED[count] if count < len(_SPELLED) else f"{count:,}"


def listed(names: Iterable[str]) -> str:
    """Return names as a list in words."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def moment(text: str | None) -> str:
    """Return a time of ISO 8601 as people write it; any other text as it is."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d)(:\d\d(\.\d+)?)?(Z|\+00:00)", text or "")
    return f"{found[1]} {found[2]} UTC" if found else text or "nobody said when"


def sentence(text: str) -> str:
    """Return a text that begins and ends like a sentence."""
    text = text.strip()
    ending = "" if text.endswith((".", "!", "?")) else "."
    return f"{text[:1].upper()}{text[1:]}{ending}" if text else ""


def _visible(control: re.Match[str]) -> str:
    code = ord(control[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else "\N{REPLACEMENT CHARACTER}"
