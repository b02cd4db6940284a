"""A disk that is full while a server runs: what is to be kept is not, once told, and nothing else changes.

The files of counters have their own tests, in `test_exporter.py`.
"""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recording import heard
from tests.serving import ROOT
from tests.test_exporter import namespace
from tests.test_rollout_gates import BASELINE
from tests.test_rollout_run import amid_a_hold, prepared, running, server
from vllm_gumbel import SamplerSettings
from vllm_gumbel.metrics import glitch
from vllm_gumbel.metrics.catalogue import AnomalyKind
from vllm_gumbel.metrics.files import written_whole
from vllm_gumbel.rollout.journal import Journal, JournalError, Keeper
from vllm_gumbel.rollout.state import Rollout

__all__ = ["namespace", "prepared", "running", "server"]  # fixtures

JOURNAL = Journal("http://a", "1,5", 600.0, baseline=BASELINE)


def fill(folder: Path) -> Path:
    """Take all the space of a folder's disk, and return the file that has it."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


def keep_on_a_full_disk(folder: Path) -> None:
    """Keep everything that is kept on a small disk, before, while and after it is full; print what came of it."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=True)
    state, journal, listed = (folder / name for name in ("state.json", "run.json", "glitches.json"))
    rollout = Rollout(SamplerSettings(rollout_fraction=0.25, rollout_state=str(state)))
    found = {}

    def keep(name: str, fraction: float) -> None:
        with heard() as said:
            rollout.change({"fraction": fraction})
            with contextlib.suppress(JournalError):
                Keeper(journal).save(JOURNAL)
            glitch._save(glitch.Glitches([1], [], [], {1: "x"}, {1: 0.5}, 0, 0, True, 10, "x"), listed)
        files = sorted(path.name for path in folder.iterdir() if path.name != "ballast")
        found[name] = {
            "files": files,
            "kept": json.loads(state.read_text())["fraction"],
            "holds": rollout.fraction,
            "said": [line for line in said if "cannot be" in line],
        }

    rollout.change({"fraction": 0.5})
    ballast = fill(folder)
    keep("full", 0.75)
    ballast.unlink()
    keep("free", 1.0)
    print(json.dumps(found))


def test_what_cannot_be_kept_leaves_nothing_half_and_the_change_holds(tmp_path, namespace):
    program = "import sys; from tests import test_faults_disk as here; here.keep_on_a_full_disk(here.Path(sys.argv[1]))"
    command = [*namespace, sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    full, free = found["full"], found["free"]
    assert (full["files"], full["kept"], full["holds"]) == (["state.json"], 0.5, 0.75), "what was kept before stays"
    assert len(full["said"]) == 2
    assert all("No space left on device" in line for line in full["said"])
    assert free["files"] == ["glitches.json", "run.json", "state.json"]
    assert (free["kept"], free["holds"], free["said"]) == (1.0, 1.0, [])


def test_file_takes_its_place_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"before")
    with pytest.raises(TypeError), written_whole(path) as file:
        file.writelines([b"half", None])
    assert path.read_bytes() == b"before"
    with written_whole(path) as file:
        file.write(b"after")
        assert path.read_bytes() == b"before"
    assert path.read_bytes() == b"after"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError), written_whole(tmp_path / "none" / "a"):
        pass


def test_failed_stage_is_a_failure_where_that_cannot_be_kept(server, prepared):
    """The exit code must not be that of a run that could not be made, which somebody would try again."""
    server.spoilt = {AnomalyKind.OUTSIDE_FILTER: 1}
    run = prepared()

    def spoil():
        run.keeper.path.unlink()
        run.keeper.path.mkdir()

    amid_a_hold(run, spoil)
    assert run() == 1
    assert server.changes == [(0.5, 0.0), (0.0, 0.0)]
    assert "cannot be written: Is a directory; another run with it would set the server again" in run.said.getvalue()
