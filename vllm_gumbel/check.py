"""Says whether a running server draws exactly, from what its `/metrics` has counted: `vllm-gumbel check`."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.exactness import (
    ERRORS,
    POWER,
    Evidence,
    State,
    Verdict,
    overall,
    rate_of_look,
    tokens_needed,
    verdicts,
)
from vllm_gumbel.metrics.scrape import Scrape, ScrapeError, evidence_by_arm, fetch

#: Exit codes; wrong usage exits with 2.
CODES = {State.EXACT: 0, State.INEXACT: 1, State.UNKNOWN: 3}
USAGE = 2

#: Seconds between two looks of `--watch` where none are given.
INTERVAL = 30.0


@dataclass(frozen=True)
class ArmReport:
    """What was found out about one arm.

    Attributes:
        arm: its name.
        state: exact, not exact, unknown.
        evidence: that it rests on.
        verdicts: of every test.
        tested_share: of the arm's drawn tokens; None if none was drawn.
        needed: tokens that show an error, by its name in `exactness.ERRORS`; None where no number would.
    """

    arm: str
    state: State
    evidence: Evidence
    verdicts: list[Verdict]
    tested_share: float | None
    needed: dict[str, float | None]


@dataclass(frozen=True)
class Report:
    """What one look found out.

    Attributes:
        address: of the page.
        covers: what was counted when, in words.
        alpha: chance that an exact server is called not exact, over all looks.
        look: number of the look at growing evidence, from 1; 0 if there is only this one.
        state: of all arms together.
        arms: those that were judged.
    """

    address: str
    covers: str
    alpha: float
    look: int
    state: State
    arms: list[ArmReport]


class NoSuchArmError(ValueError):
    """The page has no arm of that name; the message says which it has."""


def judge(
    now: Scrape, before: Scrape | None, covers: str, alpha: float, look: int = 0, only: str | None = None
) -> Report:
    """Return what a page says about every arm with traffic.

    Args:
        now: the page.
        before: an earlier state of it, whose counts are left out; None for none.
        covers: what that is, in words.
        alpha: chance that an exact server is called not exact, over all looks; divided among the arms judged.
        look: number of the look, from 1; 0 for the only one.
        only: name of one arm; None for all that have watched tokens.

    Raises:
        NoSuchArmError: `only` is not on the page.
    """
    arms = now.arms()
    if only is not None and only not in arms:
        raise NoSuchArmError(f"{now.address} has no arm {only!r}, only {', '.join(arms) or 'none'}")
    earlier = {} if before is None else evidence_by_arm(before)
    evidence = {
        arm: each - earlier.get(arm, Evidence()) for arm, each in evidence_by_arm(now).items() if only in (None, arm)
    }
    evidence = {arm: each for arm, each in evidence.items() if each.watched or only} or evidence
    share = (rate_of_look(alpha, look) if look else alpha) / max(1, len(evidence))
    reports = []
    for arm, each in evidence.items():
        found = verdicts(each, share)
        drawn = now.total(catalogue.SAMPLED_TOKENS, arm=arm)
        drawn -= before.total(catalogue.SAMPLED_TOKENS, arm=arm) if before else 0
        needed = {error: tokens_needed(each, error, share) for error in ERRORS}
        tested = each.tested / drawn if drawn else None
        reports.append(ArmReport(arm, overall(found), each, found, tested, needed))
    return Report(now.address, covers, alpha, look, _together([report.state for report in reports]), reports)


def lines(report: Report) -> list[str]:
    """Return a report in words."""
    said = [f"{report.address}, {report.covers}"]
    for arm in report.arms:
        said += ["", _headline(arm)]
        for verdict in arm.verdicts:
            p = "" if verdict.p_value is None else f"; p = {verdict.p_value:.2g}, not exact below {verdict.rate:.2g}"
            said.append(f"  {verdict.test:<15} {verdict.state:<10} {verdict.says}{p}")
        said += _sizes(arm)
    together = f"all tests{' and looks' if report.look else ''} together"
    return [*said, "", f"An exact server is called not exact with a chance of {report.alpha:.2g} at most, {together}."]


def as_json(report: Report) -> str:
    """Return a report as one line of JSON."""
    return json.dumps(asdict(report), allow_nan=False)


def run(
    url: str,
    *,
    seconds: float | None = None,
    watch: bool = False,
    since_start: bool = False,
    alpha: float = 1e-6,
    arm: str | None = None,
    json_lines: bool = False,
    timeout: float = 10.0,
) -> int:
    """Look at a server, print what was found, and return the exit code: 0 exact, 1 not exact, 2 usage, 3 unknown.

    Args:
        url: of the server or of its metrics page.
        seconds: judge what is counted from now on for so long; with `watch` the time between looks. None judges
            everything counted since the server started.
        watch: look again and again, until something is not exact.
        since_start: judge everything since the server started all the same.
        alpha: chance that an exact server is called not exact, over all looks.
        arm: judge this one only.
        json_lines: print a line of JSON a look.
        timeout: seconds that the server may take to answer.
    """
    code = CODES[State.UNKNOWN]
    try:
        for look, (now, before, covers) in enumerate(_looks(url, seconds, watch, since_start, timeout), 1):
            report = judge(now, before, covers, alpha, look if watch else 0, arm)
            print(as_json(report) if json_lines else "\n".join(lines(report)), flush=True)
            code = CODES[report.state]
            if report.state is State.INEXACT:
                break
            if watch and not json_lines:
                print()
    except ScrapeError as error:
        print(f"vllm-gumbel check: {error}", file=sys.stderr)
        return CODES[State.UNKNOWN]
    except NoSuchArmError as error:
        print(f"vllm-gumbel check: {error}", file=sys.stderr)
        return USAGE
    return code


def _looks(
    url: str, seconds: float | None, watch: bool, since_start: bool, timeout: float
) -> Iterator[tuple[Scrape, Scrape | None, str]]:
    """Yield each look: the page, the earlier one to leave out, and what that covers in words.

    Raises:
        ScrapeError: no page; when watching only if there never was one.
    """
    everything = "everything counted since the server started"
    last = fetch(url, timeout)
    if seconds is None and not watch:
        yield last, None, everything
        return
    before, began, restarted = (None if since_start else last), last.seconds, False
    while True:
        time.sleep(INTERVAL if seconds is None else seconds)
        try:
            now = fetch(url, timeout)
        except ScrapeError as error:
            if not watch:
                raise
            print(f"vllm-gumbel check: {error}; looking again", file=sys.stderr)
            continue
        if now.restarted_since(last):
            before, restarted = None, True
            print("vllm-gumbel check: the server has restarted; what it counted before is left out", file=sys.stderr)
        last = now
        if restarted:
            yield now, None, f"{everything} anew"
        elif since_start:
            yield now, None, everything
        else:
            yield now, before, f"what was counted in {now.seconds - began:.0f} s"
        if not watch:
            return


def _together(states: list[State]) -> State:
    """Return the state of a server: one arm that is not exact is enough, and all must be exact to be exact."""
    for state in (State.INEXACT, State.UNKNOWN):
        if state in states:
            return state
    return State.EXACT if states else State.UNKNOWN


def _headline(arm: ArmReport) -> str:
    tested = f"{arm.evidence.tested:,.0f} tested tokens"
    if arm.state is State.EXACT:
        line = f"arm {arm.arm} draws exactly as far as {tested} can tell"
    elif arm.state is State.INEXACT:
        failed = ", ".join(verdict.test for verdict in arm.verdicts if verdict.state is State.INEXACT)
        line = f"arm {arm.arm} does NOT draw exactly, as {tested} show: {failed}"
    elif not arm.evidence.watched:
        return f"arm {arm.arm}: unknown, no token was watched (no traffic, or the server's setting `watch` is 0)"
    elif not arm.evidence.tested:
        return f"arm {arm.arm}: unknown, since only random draws of requests without a seed can be tested: none so far"
    else:
        line = f"arm {arm.arm}: unknown, {tested} are too few"
    share = "" if not arm.tested_share else f" ({arm.tested_share:.1%} of those drawn)"
    return line + share


def _sizes(arm: ArmReport) -> list[str]:
    """Return which errors would have been seen, and what it takes to see the others."""
    said = []
    for error, needed in arm.needed.items():
        if needed is None:
            continue
        missing = needed - arm.evidence.tested
        said.append(f"    {error:<32} {f'in {missing:,.0f} tested tokens more' if missing > 0 else 'by now'}")
    return [f"  With a chance of {POWER:.0%} these tests would see:", *said] if said else []
