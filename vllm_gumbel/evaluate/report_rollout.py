"""The page of a rollout: how far it came, which gates said what at every look, and what they would have found."""

import math
import time
from collections.abc import Iterator

from vllm_gumbel.evaluate import plots
from vllm_gumbel.evaluate.page import Cell, Figure, Finding, Page, Section, Table
from vllm_gumbel.evaluate.report_shapes import Gate, Look, Rollout
from vllm_gumbel.evaluate.words import counted, listed, number, sentence

MARKS = {"pass": "good", "fail": "bad", "unknown": "unsure", "shown": ""}
#: Looks beside each other in a table, so that it fits on paper.
ABREAST = 7
#: What the exit code of a run says.
ENDS = {
    0: Finding("All stages are passed.", "good"),
    1: Finding("A gate failed, and the server was set back.", "bad"),
    2: Finding("The run could not go on: server, key or Prometheus did not do.", "unsure"),
    3: Finding("The run ended without a decision: too little was counted, or somebody else set the server.", "unsure"),
    130: Finding("The run was interrupted.", "unsure"),
}


def page(data: Rollout) -> Page:
    """Return the page of a rollout."""
    lead, *others = _findings(data)
    facts = [
        ("Server", data.server),
        ("Prometheus", data.prometheus or "not named"),
        ("Stages, percent", data.stages),
        ("Hold of a stage", f"{number(data.hold_seconds)} s"),
        ("Chance of a false alarm", number(data.alpha)),
        ("Measured", _measured(data.looks)),
    ]
    sections = [
        Section("Gates at each look", tables=_matrices(data.looks), figures=list(_figures(data.looks))),
        Section("What each look saw", tables=[_table(look) for look in reversed(data.looks)]),
    ]
    return Page(f"Rollout of {data.server}", "A staged rollout", lead, facts, others, _limits(data), sections)


def _measured(looks: list[Look]) -> str:
    times = [each for look in looks for each in (look.began, look.ended) if each is not None and 0 <= each < 1e11]
    return f"{_time(min(times))} to {_time(max(times))}" if times else "nothing yet"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _findings(data: Rollout) -> Iterator[Finding]:
    """Yield what was found, the main thing first."""
    yield _end(data)
    for look in data.looks:
        failed = [gate for gate in look.results if gate.outcome == "fail"]
        for gate in failed:
            yield Finding(f"{look.stage}, look {look.look}: {gate.gate} failed. {sentence(gate.says)}", "bad")
    if data.set_back_seconds is not None:
        yield Finding(f"The server was set back after {number(data.set_back_seconds)} s.")
    passed = [look.stage for look in data.looks if look.outcome == "pass"]
    if passed:
        yield Finding(f"Passed: {listed(passed)}.", "good")
    unknown = [look for look in data.looks if look.outcome == "unknown"]
    if unknown:
        yield Finding(
            f"{counted(len(unknown), 'look').capitalize()} could not tell; each held its stage once more.", "unsure"
        )
    if data.looks:
        finds = [gate for gate in data.looks[-1].results if gate.finds is not None and gate.outcome == "pass"]
        for gate in finds[:3]:
            rise = 1e6 * (gate.finds or 0)
            yield Finding(f"At the last look {gate.gate} had found {number(rise)} events in a million or more.")


def _end(data: Rollout) -> Finding:
    if data.exit_code is None:
        at = f" at {data.looks[-1].stage}" if data.looks else ""
        return Finding(f"The run had not ended when this was written{at}.", "unsure")
    unknown = Finding(f"The run ended with exit code {data.exit_code}.", "unsure")
    return ENDS.get(data.exit_code, unknown)


def _limits(data: Rollout) -> list[str]:
    limits = ["A gate that passed shows no rise above what it would have found, not that there is none."]
    if data.alpha is not None:
        limits.append(
            f"An arm that is no worse than tolerated fails the run with a chance of {number(data.alpha)} at most, its "
            "gates with a chance together; latency and time in the sampler have limits, no error rate."
        )
    return [*limits, "What was counted is this traffic in this time; other requests may show other things."]


def _gates(looks: list[Look]) -> list[str]:
    """Return the names of all gates, in the order in which they first appear."""
    return list(dict.fromkeys(gate.gate for look in looks for gate in look.results))


def _matrices(looks: list[Look]) -> list[Table]:
    """Return which gate said what at every look, a few looks beside each other."""
    tables = []
    for first in range(0, len(looks), ABREAST):
        some = looks[first : first + ABREAST]
        rows: list[list[str | Cell]] = [["all together", *(Cell(look.outcome, MARKS[look.outcome]) for look in some)]]
        for name in _gates(some):
            said = [{gate.gate: gate.outcome for gate in look.results}.get(name) for look in some]
            rows.append([name, *(Cell(each, MARKS[each]) if each else Cell() for each in said)])
        title = "Outcome of every gate" if len(looks) <= ABREAST else f"Looks {first + 1} to {first + len(some)}"
        tables.append(Table(title, ["Gate", *(f"{look.stage}, look {look.look}" for look in some)], rows))
    return tables


def _figures(looks: list[Look]) -> Iterator[Figure]:
    """Yield how near each gate of the last look came to failing."""
    if not looks:
        return
    last = looks[-1]
    gates = [gate for gate in last.results if _nearness(gate) is not None]
    if not gates:
        return
    title = f"How near each gate came to failing: {last.stage}, look {last.look}"
    says = "Orders of magnitude of the p-value, over those at which the gate fails: 1, the dashed line, is a failure."
    names = plots.Names("nearness", title, says, "share of the way to a failure")
    rows = [(gate.gate, min(_nearness(gate) or 0.0, 1.6), f"p {number(gate.p_value, 2)}") for gate in gates]
    yield Figure(title, plots.bars(names, rows, line_at=1.0), says)


def _nearness(gate: Gate) -> float | None:
    """Return the logarithm of a gate's p-value over that at which it fails; None where there is none."""
    if gate.p_value is None or gate.rate is None or not 0 < gate.rate < 1:
        return None
    return max(0.0, math.log(max(gate.p_value, 1e-300)) / math.log(gate.rate))


def _table(look: Look) -> Table:
    rows: list[list[str | Cell]] = [
        [
            gate.gate,
            Cell(gate.outcome, MARKS[gate.outcome]),
            gate.says,
            "" if gate.p_value is None else number(gate.p_value, 2),
            "" if gate.rate is None else number(gate.rate, 2),
            "" if gate.finds is None else number(1e6 * gate.finds),
        ]
        for gate in look.results
    ]
    title = f"{look.stage}, look {look.look}: {look.outcome}"
    columns = ["Gate", "Says", "Seen", "p", "Fails below", "Would find, per million"]
    return Table(title, columns, rows)
