"""Opens pages in a real Chromium without a window, through its debugging pipe, and asks what it made of them."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import stop

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def program() -> str:
    """Return the path of a Chromium; the test is skipped if there is none."""
    found = next((path for path in map(shutil.which, PROGRAMS) if path), None)
    if found is None:
        pytest.skip(f"no browser on PATH: none of {', '.join(PROGRAMS)}")
    return found


class Browser:
    """A running browser with one page.

    Attributes:
        events: what the page's session reported since `open`, as method and parameters.
    """

    def __init__(self, process: subprocess.Popen, commands: int, answers: int) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._process, self._commands, self._answers = process, commands, answers
        self._number, self._left, self._session = 0, b"", None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def open(self, page: Path, width: int, height: int = 844, scheme: str = "light") -> None:
        """Load a page from disk in a window of this size and colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.ask("Page.navigate", url=page.as_uri())
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            self._next(time.monotonic() + 60)

    def value(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript in the page."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer to a command of the debugging protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self, deadline: float) -> dict[str, Any]:
        """Return the next message, and keep it if it is an event."""
        while b"\0" not in self._left:
            assert time.monotonic() < deadline, "the browser does not answer"
            part = os.read(self._answers, 2**20)
            assert part, "the browser has ended"
            self._left += part
        line, self._left = self._left.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append((message["method"], message.get("params", {})))
        return message


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Run a browser until the context ends; the folder gets its profile and its log."""
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    arguments = [program(), *flags, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}", "about:blank"]
    # The protocol wants its pipes at 3 and 4; a shell puts them there.
    shell = ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", *arguments]
    with (folder / "browser.log").open("w") as log:
        process = subprocess.Popen(
            shell, stdout=log, stderr=log, pass_fds=(to_browser, from_browser), start_new_session=True
        )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Browser(process, commands, answers)
    finally:
        stop(process)
        os.close(commands)
        os.close(answers)
