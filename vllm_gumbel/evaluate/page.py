"""What a page is made of, and how it becomes one file of HTML.

A page holds everything it needs and asks for nothing: no script, no address that is loaded, and a policy (CSP) that
forbids what might ever slip in. Everything that comes from data is escaped by the template; only drawings are markup.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup

from vllm_gumbel.evaluate.plots_canvas import Key

FOLDER = Path(__file__).parent
#: Rows of a table that are shown at most, so that a page of many records still opens; it says how many there are.
ROWS = 400

_FIGURE = re.compile("[-+\N{MINUS SIGN}\N{EN DASH}\\d.,%e ]*")


class PageError(Exception):
    """A page cannot be made or written; the message says why."""


@dataclass(frozen=True)
class Cell:
    """A cell that is more than text.

    Attributes:
        text: of it; may be empty beside a drawing.
        mark: `good`, `bad`, `unsure` or nothing.
        drawing: beside the text.
    """

    text: str = ""
    mark: str = ""
    drawing: Markup | None = None


@dataclass(frozen=True)
class Table:
    """A table, whose first column names the rows.

    Attributes:
        title: above it.
        columns: titles.
        rows: of as many cells each.
        note: below it; may be empty.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    note: str = ""

    def without_empty_columns(self) -> "Table":
        """Return it without the columns in which nothing stands."""
        kept = [i for i in range(len(self.columns)) if any(row[i] not in ("", Cell()) for row in self.rows)]
        rows = [[row[i] for i in kept] for row in self.rows]
        return Table(self.title, [self.columns[i] for i in kept], rows, self.note)

    @property
    def shown(self) -> list[list[Cell]]:
        """The rows that are shown."""
        return [[each if isinstance(each, Cell) else Cell(each) for each in row] for row in self.rows[:ROWS]]

    @property
    def left_out(self) -> int:
        """How many rows are not shown."""
        return max(0, len(self.rows) - ROWS)

    @property
    def alignment(self) -> list[str]:
        """The class of each column: figures go to the right."""
        columns = zip(*([cell.text for cell in row] for row in self.shown), strict=True)
        figures = [any(cells) and all(map(_FIGURE.fullmatch, cells)) for cells in columns]
        return ["figure" if i and figure else "" for i, figure in enumerate(figures)] or [""] * len(self.columns)


@dataclass(frozen=True)
class Figure:
    """A drawing with what it says.

    Attributes:
        title: above it.
        drawing: of it.
        says: below it, in words.
        legend: of its series.
        numbers: the same as a table, folded; None if a table of the page has them.
    """

    title: str
    drawing: Markup
    says: str
    legend: Sequence[Key] = ()
    numbers: Table | None = None


@dataclass(frozen=True)
class Text:
    """A text somebody sent or got.

    Attributes:
        name: whose it is.
        same: its beginning, which others share.
        rest: what follows.
    """

    name: str
    same: str
    rest: str


@dataclass(frozen=True)
class Example:
    """Texts beside each other, folded under a title."""

    title: str
    texts: Sequence[Text]


@dataclass(frozen=True)
class Section:
    """A part of a page; what is empty is left out."""

    title: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    examples: Sequence[Example] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it."""
        return not (self.paragraphs or self.tables or self.figures or self.examples)


@dataclass(frozen=True)
class Finding:
    """What was found, in a sentence, with a mark: `good`, `bad`, `unsure` or nothing."""

    text: str
    mark: str = ""


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        title: of it.
        kind: what it is about, in words.
        lead: the main finding.
        facts: what was measured, when and with what: names and values.
        findings: the others.
        limits: what the findings do not say.
        sections: tables and drawings.
    """

    title: str
    kind: str
    lead: Finding
    facts: Sequence[tuple[str, str]]
    findings: Sequence[Finding] = ()
    limits: Sequence[str] = ()
    sections: Sequence[Section] = field(default_factory=list)


def render(page: Page) -> str:
    """Return a page as HTML.

    Raises:
        PageError: jinja2 is missing.
    """
    try:
        import jinja2
    except ImportError:
        raise PageError("jinja2 is missing: pip install 'vllm-gumbel[evaluate]'") from None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = Markup((FOLDER / "page.css").read_text())
    return environment.get_template("page.html.jinja").render(page=page, style=style)
