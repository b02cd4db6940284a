"""The page of a knob study: what each setting of a request does to distribution, text and throughput."""

from collections.abc import Callable, Iterator

from vllm_gumbel.evaluate import plots
from vllm_gumbel.evaluate.page import Figure, Finding, Page, Section, Table
from vllm_gumbel.evaluate.report_shapes import Setting, Study
from vllm_gumbel.evaluate.words import counted, number, percent

#: Figure -> title and how it is shown.
COLUMNS: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "kl_nats": ("KL from the model, nats", number),
    "entropy_nats": ("Entropy, nats", number),
    "kept_ids": ("Ids that can be drawn", number),
    "mean_logprob": ("Mean log-probability, nats", number),
    "distinct_1": ("Distinct-1", number),
    "distinct_2": ("Distinct-2", number),
    "distinct_3": ("Distinct-3", number),
    "loop_rate": ("Texts with a loop", percent),
    "loop_share": ("Tokens in loops", percent),
    "throughput_ratio": ("Throughput over plain", number),
    "stock_ratio": ("Throughput over vLLM's own", number),
}
#: Figures that are drawn as bars, with the value at which a line is drawn.
BARS = {
    "kl_nats": None,
    "entropy_nats": None,
    "kept_ids": None,
    "loop_rate": None,
    "throughput_ratio": 1.0,
    "stock_ratio": 1.0,
}
#: Figures whose least and largest are put into words: what comes before them, and their unit.
ENDS = {
    "entropy_nats": ("Entropy goes from", " nats"),
    "mean_logprob": ("The mean log-probability of a text's tokens goes from", " nats"),
    "loop_rate": ("The share of texts that end in a loop goes from", ""),
    "throughput_ratio": ("Throughput, over the plain setting's, goes from", ""),
    "stock_ratio": ("Throughput, over that of vLLM's own sampler, goes from", ""),
}


def page(data: Study) -> Page:
    """Return the page of a study."""
    lead, *others = _findings(data)
    sizes = {
        "Prompts": data.prompts,
        "Tokens a text": data.tokens,
        "Distributions": data.rows,
        "Rounds of throughput": data.rounds,
    }
    facts = [("Settings", f"{len(data.settings):,}"), *((name, f"{size:,}") for name, size in sizes.items() if size)]
    sections = [
        Section("In pictures", figures=list(_figures(data))),
        Section("Every figure", tables=[_table(data)]),
    ]
    title = "What the settings of a request do"
    return Page(title, "A study of settings", lead, facts, others, _limits(data), sections)


def _known(data: Study, key: str) -> list[tuple[str, float]]:
    """Return the settings that have a figure, in order."""
    values = ((name, getattr(setting, key)) for name, setting in data.settings.items())
    return [(name, value) for name, value in values if value is not None]


def _findings(data: Study) -> Iterator[Finding]:
    """Yield what was found, the main thing first."""
    settings = counted(len(data.settings), "setting")
    farthest = max(_known(data, "kl_nats"), key=lambda each: each[1], default=None)
    if farthest is None:
        yield Finding(f"Of {settings} no distribution was computed.", "unsure")
    else:
        name, value = farthest
        yield Finding(
            f"Of {settings}, \u201c{name}\u201d moves the distribution farthest: {number(value)} nats of KL from the "
            "model's own."
        )
    same = sum(value == 0 for _, value in _known(data, "kl_nats"))
    if same:
        leave = counted(same, "setting leaves", "settings leave").capitalize()
        yield Finding(f"{leave} the distribution as it is.")
    for key, (before, unit) in ENDS.items():
        known = sorted(_known(data, key), key=lambda each: each[1])
        if known:
            low, high = (
                f"{COLUMNS[key][1](value)}{unit} (\u201c{name}\u201d)" for name, value in (known[0], known[-1])
            )
            yield Finding(f"{before} {low} to {high}.")


def _limits(data: Study) -> list[str]:
    return [
        "A likelier text is no better text: loops are likely.",
        "One model, these prompts: another model may answer a setting otherwise.",
        "Throughput is the whole engine's on one machine; a few percent come and go with its load.",
    ]


def _table(data: Study) -> Table:
    rows = [[name, *_row(setting)] for name, setting in data.settings.items()]
    return Table("Each setting", ["Setting", *(title for title, _ in COLUMNS.values())], rows)


def _row(setting: Setting) -> list[str]:
    return [show(getattr(setting, key)) for key, (_, show) in COLUMNS.items()]


def _figures(data: Study) -> Iterator[Figure]:
    for key, line_at in BARS.items():
        known = _known(data, key)
        if known:
            title, show = COLUMNS[key]
            line = " The dashed line is 1: as fast." if line_at is not None else ""
            says = f"{title}, one bar a setting.{line}"
            names = plots.Names(key.replace("_", "-"), title, says)
            rows = [(name, max(value, 0.0), show(value)) for name, value in known]
            yield Figure(title, plots.bars(names, rows, line_at), says)
    spots = [
        plots.Spot(setting.entropy_nats, setting.mean_logprob, name)
        for name, setting in data.settings.items()
        if setting.entropy_nats is not None and setting.mean_logprob is not None
    ]
    if spots:
        title = "Entropy and likelihood"
        says = "Each setting's entropy and the mean log-probability of its texts; names where there is room."
        names = plots.Names("entropy-and-logprob", title, says, "entropy, nats", "mean log-probability, nats")
        yield Figure(title, plots.scatter(names, spots), says)
