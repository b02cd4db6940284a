"""Sets a server, waits until Prometheus shows it, and holds it so while counters grow.

Waiting goes by this machine's monotonic clock, windows by Prometheus' own. What cannot be asked is asked again until
the hold is over.
"""

import math
import time
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

from vllm_gumbel.rollout.client import Control, ControlError, State
from vllm_gumbel.rollout.history import HistoryError, Prometheus, Window
from vllm_gumbel.rollout.results import Outcome, Question
from vllm_gumbel.rollout.server_gates import asked
from vllm_gumbel.rollout.stages import Stage, spoken

#: Seconds between two looks during a hold: a twentieth of it within these.
SOONEST, LATEST = 0.5, 15.0
#: Seconds that Prometheus gets to show what was set, or that a server restarted: a hold within these.
SHORTEST_PATIENCE, LONGEST_PATIENCE = 15.0, 180.0

T = TypeVar("T")


class DisturbedError(Exception):
    """A window cannot be judged; the message says why.

    Attributes:
        anew: whether it must begin anew.
    """

    def __init__(self, message: str, anew: bool = True) -> None:
        super().__init__(message)
        self.anew = anew


class SomebodyElseError(Exception):
    """The server was set by somebody else; the message says to what."""


class Holder:
    """Holds one server.

    Args:
        control: of the server.
        history: where its metrics are.
        seconds: a hold.
        notes: for the progress bar and what cannot be asked.
    """

    def __init__(self, control: Control, history: Prometheus, seconds: float, notes: Console) -> None:
        self._control, self._history, self._seconds, self._notes = control, history, seconds, notes
        self._poll = min(LATEST, max(SOONEST, seconds / 20))

    def set(self, stage: Stage) -> float:
        """Set the server, and return from when on Prometheus shows that, on its clock.

        Raises:
            DisturbedError: it does not in time, or one of the two cannot be reached.
            ControlError, HistoryError: one of them refuses.
        """
        patience = self._patience()
        deadline = time.monotonic() + patience
        self._patiently(lambda: self._control.change(fraction=stage.fraction, shadow=stage.shadow), deadline)
        began = self._patiently(self._history.time, deadline)
        while True:
            window = self._patiently(lambda: self._window(began), deadline)
            shown = asked(Question(window, (), 1.0, fraction=stage.fraction, shadow=stage.shadow))
            if all(result.outcome is Outcome.PASS for result in shown):
                return began
            if time.monotonic() > deadline:
                says = "; ".join(f"{result.gate} {result.says}" for result in shown)
                raise DisturbedError(f"Prometheus did not show in {spoken(patience)} what was set: {says}")
            time.sleep(self._poll)

    def hold(self, stage: Stage, began: float, holds: int, name: str, fails: Callable[[Window], bool]) -> Window:
        """Wait until a window is so many holds long, and return it.

        Args:
            stage: what the server was set to.
            began: the window's beginning.
            holds: its length.
            name: of the stage.
            fails: whether a window shows already what no later one can make good.

        Raises:
            DisturbedError: a restart, a clock that went back, or one of the two cannot be reached.
            SomebodyElseError: the server is not as it was set.
            ControlError, HistoryError: one of them refuses.
        """
        length = holds * self._seconds
        deadline = time.monotonic() + self._seconds
        self._must_be(stage, began, self._patiently(self._control.state, deadline))
        left = began + length - self._patiently(self._history.time, deadline)
        if left > length + 1:
            raise DisturbedError("Prometheus' clock went back")
        start = time.monotonic()
        with Progress(console=self._notes, transient=True, disable=not self._notes.is_terminal) as progress:
            task = progress.add_task(name, total=length)
            while (waited := time.monotonic() - start) < left:
                progress.update(task, completed=length - left + waited)
                time.sleep(min(self._poll, left - waited))
                window = self._peek(stage, began)
                if window is not None and fails(window):
                    return window
        deadline = time.monotonic() + self._seconds
        self._must_be(stage, began, self._patiently(self._control.state, deadline))
        window = self._patiently(lambda: self._window(began), deadline)
        if window.ended - began < 0.9 * length:
            raise DisturbedError("Prometheus' clock went back")
        return window

    def _peek(self, stage: Stage, began: float) -> Window | None:
        """Return the window so far; None if that cannot be asked now."""
        try:
            self._must_be(stage, began, self._control.state())
            return self._window(began)
        except (ControlError, HistoryError) as error:
            if not error.passing:
                raise
            self.say(f"{error}; asking again")
            return None

    def _must_be(self, stage: Stage, began: float, state: State) -> None:
        """Make sure that the server is as it was set; else it restarted, or somebody else set it."""
        if math.isclose(state.fraction, stage.fraction) and math.isclose(state.shadow, stage.shadow):
            return
        deadline = time.monotonic() + self._patience()
        while time.monotonic() < deadline:
            self._patiently(lambda: self._window(began), deadline)
            time.sleep(self._poll)
        says = f"the server has fraction {state.fraction:g}, shadow {state.shadow:g}, which this run did not set"
        raise SomebodyElseError(f"{says}, and Prometheus shows no restart: somebody else did")

    def _patience(self) -> float:
        """Return the seconds that Prometheus gets to show something."""
        return min(LONGEST_PATIENCE, max(SHORTEST_PATIENCE, self._seconds))

    def _window(self, began: float) -> Window:
        """Return the window from a time until now, of servers that did not restart in it."""
        window = self._history.window(began, max(began, self._history.time()))
        if window.restarted:
            raise DisturbedError(f"restarted: {', '.join(window.restarted)}; to be set again, and counted anew")
        return window

    def _patiently(self, act: Callable[[], T], deadline: float) -> T:
        """Do what may fail for a while, until a time on the monotonic clock."""
        said = False
        while True:
            try:
                return act()
            except (ControlError, HistoryError) as error:
                if not error.passing:
                    raise
                if time.monotonic() > deadline:
                    raise DisturbedError(str(error), anew=False) from None
                if not said:
                    self.say(f"{error}; asking again")
                said = True
                time.sleep(self._poll)

    def say(self, text: str) -> None:
        """Print a line that is no result."""
        self._notes.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False, soft_wrap=True)
