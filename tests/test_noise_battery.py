"""The battery's script: its compiled streams are the reference's, and the whole battery behind the marker `long`."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "noise_battery.py"


def run(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_streams_equal_the_reference_and_every_input_bit_avalanches():
    """The script compares its streams with the reference before anything else; then 20,000 samples a bit."""
    result = run("avalanche", "--samples", "20000")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("axis", ["token", "position", "seed", "interleaved"])
@pytest.mark.parametrize("kind", ["upper16", "word64"])
def test_whole_battery_fails_nothing(kind, axis, tmp_path):
    """dieharder's 114 results on one stream, about 20 minutes; needs Debian's package dieharder."""
    result = run("run", "--kind", kind, "--axis", axis, "--out", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "whole battery" in result.stdout
