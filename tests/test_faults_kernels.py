"""Compiled kernels on a disk that is full, read-only or holds damaged files: they are compiled anew, and draw."""

import subprocess
import sys

import pytest

from tests.serving import ROOT
from tests.test_exporter import namespace

__all__ = ["namespace"]  # a fixture

#: Compiles a kernel that calls another, and prints what it gives and whether its machine code came from the disk.
KERNELS = """if True:
    import logging
    import numpy as np
    logging.basicConfig(format="%(message)s")
    from vllm_gumbel.kernels.jit_numba import jit

    @jit
    def inner(x):
        return x + 1

    @jit
    def outer(values):
        total = 0.0
        for value in values:
            total += inner(value)
        return total

    print(outer(np.zeros(3)), sum(outer.stats.cache_hits.values()))
"""
FULL = "mount -t tmpfs -o size=8k tmpfs {folder}"
#: No folder at all: neither the cache's, nor the package's own, nor one of the user.
READ_ONLY = "mount -t tmpfs -o ro tmpfs {folder} && mount --bind {root} {root} && mount -o remount,bind,ro {root}"
SAID = "compiled kernels cannot all be kept on disk, so they are compiled anew: "


def compiled(folder, *before):
    """Return what the program says, and what the log says, with this folder as the home of all caches."""
    program = folder.parent / "kernels.py"
    if not program.exists():  # a source of another age is another kernel
        program.write_text(KERNELS)
    environment = {"XDG_CACHE_HOME": str(folder), "HOME": str(folder), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    command = [*before, sys.executable, str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), [line for line in done.stderr.splitlines() if "vllm-gumbel" in line]


@pytest.mark.parametrize(
    ("mount", "why"),
    [(FULL, "No space left on device"), (READ_ONLY, "no folder for them can be written")],
    ids=["full", "read-only"],
)
def test_kernel_that_cannot_be_kept_is_compiled_all_the_same(mount, why, tmp_path, namespace):
    folder = tmp_path / "cache"
    folder.mkdir()
    made = mount.format(folder=folder, root=tmp_path if mount == READ_ONLY else "")
    found, (line,) = compiled(folder, *namespace, "sh", "-c", f'{made} && exec "$0" "$@"')
    assert found == ["3.0", "0"]
    assert SAID in line
    assert why in line


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("length", [0, 40])
def test_damaged_file_is_replaced(suffix, length, tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    assert compiled(folder) == (["3.0", "0"], [])
    assert compiled(folder) == (["3.0", "1"], [])
    for file in folder.rglob(f"*{suffix}"):
        file.write_bytes(file.read_bytes()[:length])
    found, (line, *_) = compiled(folder)
    assert found == ["3.0", "0"]
    assert SAID in line
    assert compiled(folder) == (["3.0", "1"], [])
