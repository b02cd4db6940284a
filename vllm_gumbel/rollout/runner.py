"""Walks a server through the stages of a rollout, and sets it back when a gate fails.

Each stage: set the server, wait until Prometheus shows it, hold, judge what was counted since. Before the first stage
there is one more, the baseline, in which nothing of ours draws. Gates without a chance of a false alarm are looked at
during the hold too. What is unknown extends the stage by another hold, at the next look's share of alpha; what disturbs
a window (a restart, a clock that went back, a setting that Prometheus does not show) begins it anew, and counts as a
look.

A failed gate, and nothing else, sets the server back: when the server or Prometheus cannot be reached, or somebody else
has set the fraction, it stays where it is, and the run says where that is.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_gumbel.metrics.catalogue import DEFAULT, SHADOW
from vllm_gumbel.metrics.exactness import rate_of_look
from vllm_gumbel.rollout.client import Control, ControlError
from vllm_gumbel.rollout.counts import ArmCounts, ServerCounts
from vllm_gumbel.rollout.gates import certain, judge, together
from vllm_gumbel.rollout.history import HistoryError, Prometheus, Window
from vllm_gumbel.rollout.holding import DisturbedError, Holder, SomebodyElseError
from vllm_gumbel.rollout.journal import Journal, JournalError, Keeper
from vllm_gumbel.rollout.report import as_json, table, write
from vllm_gumbel.rollout.results import Limits, Outcome, Question, Result
from vllm_gumbel.rollout.stages import NOTHING, Stage, spoken

#: Exit codes.
PASSED, FAILED, NO_TALK, UNKNOWN, INTERRUPTED = 0, 1, 2, 3, 130
#: Seconds before each further attempt to set a server back.
BACKOFF = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)


@dataclass(frozen=True)
class Plan:
    """What is to be done.

    Attributes:
        server: address of the server.
        stages: in order.
        text: the stages as they were given.
        hold: seconds a stage.
        alpha: chance that a run of an arm that is no worse than tolerated fails, apart from the gates without a chance.
        limits: what the gates tolerate.
        give_up: unknown looks of a stage after which the run ends.
        back_when_unknown: whether it sets the server back then.
        report: file for the evidence; None for none.
    """

    server: str
    stages: tuple[Stage, ...]
    text: str
    hold: float
    alpha: float = 0.001
    limits: Limits = field(default_factory=Limits)
    give_up: int = 6
    back_when_unknown: bool = False
    report: Path | None = None


class Runner:
    """One run.

    Args:
        plan: what is to be done.
        control: of the server.
        history: where its metrics are.
        keeper: of the journal.
        out: for tables.
        notes: for everything else.
    """

    def __init__(
        self, plan: Plan, control: Control, history: Prometheus, keeper: Keeper, out: Console, notes: Console
    ) -> None:
        self._plan, self._control, self._history, self._keeper = plan, control, history, keeper
        self._out, self._notes = out, notes
        self._journal = Journal(plan.server, plan.text, plan.hold)
        self._holder = Holder(control, history, plan.hold, notes)
        self._set_back_seconds: float | None = None
        self._begun = False

    def run(self) -> int:
        """Run until all stages are passed, a gate fails or it cannot go on, and return the exit code."""
        code = NO_TALK
        try:
            with self._keeper.alone():
                self._journal = self._keeper.load(self._journal)
                self._begin()
                self._begun = True
                code = self._walk()
        except SomebodyElseError as error:
            code = UNKNOWN
            self._holder.say(f"{error}; {self._where()}")
        except (ControlError, HistoryError, JournalError) as error:
            self._holder.say(f"{error}; {self._where()}")
        except KeyboardInterrupt:
            code = INTERRUPTED
            self._holder.say(f"interrupted; {self._where()}")
        if self._begun:  # else the evidence of an earlier run would be lost
            self._write_report(code)
        return code

    def dry_run(self) -> int:
        """Print what would be done and what the gates say now, change nothing, and return 0; 2 if that is not known."""
        plan = self._plan
        try:
            state, now = self._control.state(), self._history.time()
            window = self._history.window(now - plan.hold, now)
        except (ControlError, HistoryError) as error:
            self._holder.say(str(error))
            return NO_TALK
        names = ["baseline", *(stage.name for stage in plan.stages)]
        self._out.print(f"{plan.server} now: {state}")
        self._out.print(
            f"Stages: {', '.join(names)}; {spoken(plan.hold)} each, {spoken(plan.hold * len(names))} at least"
        )
        self._out.print(
            f"An arm that is no worse than tolerated fails with a chance of {plan.alpha:.2g} at most, "
            f"{plan.alpha / len(plan.stages):.2g} a stage, all its looks and gates together"
        )
        as_is = Stage(state.fraction, state.shadow)
        question = Question(window, as_is.arms, plan.alpha, plan.limits, as_is.fraction, as_is.shadow)
        self._out.print(table(f"The last {spoken(plan.hold)}, as it is", judge(question)))
        return PASSED

    def _begin(self) -> None:
        """Make sure that both can be talked to, and say what this run goes on with."""
        journal = self._journal
        if journal.outcome is not None:
            raise JournalError(f"the run of {self._keeper.path} has ended ({journal.outcome}); remove it to begin anew")
        self._control.state()
        self._history.time()
        if journal.looks or journal.began is not None:
            self._holder.say(f"going on with {self._stage_name()}, as {self._keeper.path} has it")

    def _walk(self) -> int:
        journal, unknown = self._journal, 0
        while journal.stage < len(self._plan.stages):
            stage = self._stage()
            results, window = self._look(stage)
            outcome = together(results)
            self._record(results, window, outcome)
            if outcome is Outcome.FAIL:
                return self._fail(results)
            if outcome is Outcome.PASS and window is not None:
                self._pass(window)
                unknown = 0
                continue
            self._keeper.save(journal)
            unknown += 1
            if unknown >= self._plan.give_up:
                return self._give_up(unknown)
        journal.outcome = str(Outcome.PASS)
        self._keeper.save(journal)
        self._holder.say(f"all stages are passed; {self._where()}")
        return PASSED

    def _look(self, stage: Stage) -> tuple[list[Result], Window | None]:
        """Hold a stage, and return what the gates say, with the window they looked at; None if there is none."""
        journal = self._journal
        try:
            if journal.began is None:
                self._holder.say(f"{self._stage_name()}: setting fraction {stage.fraction:g}, shadow {stage.shadow:g}")
                journal.began = self._holder.set(stage)
                self._keeper.save(journal)
            window = self._holder.hold(
                stage, journal.began, journal.holds, self._stage_name(), lambda now: self._fails(stage, now)
            )
        except DisturbedError as disturbed:
            if disturbed.anew or journal.began is None:
                journal.begin_anew()
            else:
                journal.holds += 1
            return [Result("window", Outcome.UNKNOWN, str(disturbed))], None
        journal.holds += 1
        return judge(self._question(stage, window)), window

    def _fails(self, stage: Stage, window: Window) -> bool:
        """Return whether a gate fails for which no chance is needed."""
        found = certain(self._question(stage, window))
        return any(result.outcome is Outcome.FAIL for result in found)

    def _question(self, stage: Stage, window: Window) -> Question:
        plan, journal = self._plan, self._journal
        return Question(
            window,
            stage.arms,
            rate_of_look(plan.alpha / len(plan.stages), journal.look + 1),
            plan.limits,
            stage.fraction,
            stage.shadow,
            # The baseline compared with itself is unknown while it is too short to compare anything with.
            ServerCounts.of(window) if journal.baseline is None else journal.baseline,
            journal.earlier,
        )

    def _pass(self, window: Window) -> None:
        """Keep what later stages are compared with, and go on to the next one."""
        journal = self._journal
        if journal.baseline is None:
            journal.baseline = ServerCounts.of(window)
        for arm in (DEFAULT, SHADOW):
            journal.earlier[arm] = journal.earlier.get(arm, ArmCounts()) + ArmCounts.of(window.counted, arm)
        journal.next_stage()
        self._keeper.save(journal)

    def _fail(self, results: list[Result]) -> int:
        failed = ", ".join(result.gate for result in results if result.outcome is Outcome.FAIL)
        self._holder.say(f"{self._stage_name()} failed: {failed}; setting back")
        if not self._set_back():
            return NO_TALK
        self._journal.outcome = str(Outcome.FAIL)
        try:
            self._keeper.save(self._journal)
        except JournalError as error:  # what counts is done
            self._holder.say(f"{error}; another run with it would set the server again")
        return FAILED

    def _give_up(self, looks: int) -> int:
        self._holder.say(f"{self._stage_name()} is unknown after {looks} looks")
        if self._plan.back_when_unknown:
            return UNKNOWN if self._set_back() else NO_TALK
        self._holder.say(self._where())
        return UNKNOWN

    def _set_back(self) -> bool:
        """Set fraction and shadow to 0, however often that takes, and return whether it worked."""
        start = time.monotonic()
        for pause in (*BACKOFF, None):
            try:
                state = self._control.change(fraction=NOTHING.fraction, shadow=NOTHING.shadow)
            except ControlError as error:
                self._holder.say(f"not set back: {error}{'' if pause is None else f'; again in {pause:g} s'}")
                if pause is None:
                    break
                time.sleep(pause)
            else:
                self._set_back_seconds = time.monotonic() - start
                self._holder.say(f"set back after {self._set_back_seconds:.1f} s: {state}")
                return True
        self._notes.print("THE SERVER COULD NOT BE SET BACK: set its fraction to 0 by hand.", style="bold red")
        return False

    def _record(self, results: list[Result], window: Window | None, outcome: Outcome) -> None:
        """Show a look, and keep it."""
        journal = self._journal
        journal.look += 1
        title = f"{self._stage_name()}, look {journal.look}: {outcome}"
        self._out.print(table(title, results))
        times: dict[str, Any] = {} if window is None else {"began": window.began, "ended": window.ended}
        look = {"stage": self._stage_name(), "look": journal.look, "outcome": str(outcome), **times}
        journal.looks.append({**look, "results": as_json(results)})
        self._write_report(None)

    def _write_report(self, code: int | None) -> None:
        """Write the evidence so far; an exit code of None says that the run goes on."""
        plan = self._plan
        if plan.report is None:
            return
        settings = {"server": plan.server, "prometheus": self._history.url, "stages": plan.text}
        numbers = {"hold_seconds": plan.hold, "alpha": plan.alpha, "set_back_seconds": self._set_back_seconds}
        content = {**settings, **numbers, "exit_code": code, "looks": self._journal.looks}
        try:
            write(plan.report, content)
        except OSError as error:
            self._holder.say(f"{plan.report} cannot be written: {error.strerror}")

    def _stage(self) -> Stage:
        return NOTHING if self._journal.stage < 0 else self._plan.stages[self._journal.stage]

    def _stage_name(self) -> str:
        return "baseline" if self._journal.stage < 0 else self._stage().name

    def _where(self) -> str:
        """Return where the server stands, in words."""
        try:
            return f"the server stands at {self._control.state()}"
        except ControlError:
            return "where the server stands is not known, since it does not say"
