"""`scripts/gpu_check` where there is no GPU: it counts, and it says what it lacks."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "gpu_check"


def run(*arguments):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, env=environment)


def test_without_a_gpu_it_says_so_in_one_line():
    done = run()
    assert done.returncode == 2
    assert len((done.stdout + done.stderr).splitlines()) == 1
    assert "no GPU" in done.stderr


def test_counts_show_one_launch_and_one_reading_without_a_filter():
    """Each of 10 shapes: 2 bytes a logit and at most 6% more, most of it the rounding of the table."""
    lines = [line for line in run("--count").stdout.splitlines() if "no filter" in line]
    assert len(lines) == 10
    for line in lines:
        vocab, rows, _, _, _, launches, megabytes, _ = line.split()
        assert launches == "rows"
        assert 1 <= float(megabytes) * 1e6 / (2 * int(vocab) * int(rows)) < 1.06
