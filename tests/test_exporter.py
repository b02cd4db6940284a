"""The files through which workers count: their space, full disks, what dead processes left, and a page of one's own."""

import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from tests.recording import VOCAB, make_recorder, step, total, watched
from tests.serving import free_port
from vllm_gumbel.metrics import catalogue, exporter, refusals
from vllm_gumbel.metrics.catalogue import ARMS, FAULTS, GUMBEL, SAMPLED_TOKENS
from vllm_gumbel.metrics.exporter import PRIVATE_VARIABLE

ROOT = Path(__file__).resolve().parent.parent


def test_every_file_has_its_space_from_the_start_and_needs_a_part_of_it(tmp_path):
    """Whatever is counted goes to the files that were reserved, and fills a fifth of the fullest."""
    recorder = make_recorder(tmp_path, glitches=np.ones(VOCAB, bool), summary_seconds=10)
    recorder.record(step(1, 2, watched=watched([0, 1])))
    with exporter.worker_values(tmp_path):
        refusals.Counter(*refusals.definition(catalogue.REJECTED_PARAMS), registry=None).labels(key="x").inc()
    files = sorted(tmp_path.glob("*.db"))
    assert {file.name.removesuffix(f"_{exporter.identity()}.db") for file in files} == set(exporter.FILE_KINDS)
    for file in files:
        assert file.stat().st_size == exporter.FILE_BYTES
        assert file.stat().st_blocks * 512 >= exporter.FILE_BYTES, "no holes, which a full disk could not fill"
        assert int.from_bytes(file.read_bytes()[:4], "little") < exporter.FILE_BYTES / 5


@pytest.mark.parametrize("kind", exporter.FILE_KINDS)
def test_full_disk_is_an_error_each_time_and_leaves_no_file_without_its_space(tmp_path, monkeypatch, kind):
    reserve = exporter.os.posix_fallocate

    def fail(descriptor, offset, length):
        if kind in Path(f"/proc/self/fd/{descriptor}").readlink().name:
            raise OSError(28, "No space left on device")
        reserve(descriptor, offset, length)

    with monkeypatch.context() as full:
        full.setattr(exporter.os, "posix_fallocate", fail)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                make_recorder(tmp_path)
            assert all(file.stat().st_size == exporter.FILE_BYTES for file in tmp_path.glob("*.db"))
    make_recorder(tmp_path).record(step(1))
    assert total(tmp_path) == 1


#: Counts in a folder whose disk has room for what the first argument says, and prints what failed.
ON_A_SMALL_DISK = """if True:
    import os, subprocess, sys
    from pathlib import Path
    from tests.recording import heard, make_recorder, step, total
    from vllm_gumbel.metrics import catalogue, refusals
    folder = Path(sys.argv[1])
    {limit}
    os.environ["GUMBEL_METRICS_DIRECTORY"] = str(folder)
    with heard() as said:
        for _ in range(2):
            refusals.count_refusal("a", ("a",))
            try:
                recorder = make_recorder(folder, vocab=400_000)
            except OSError as error:
                print("none:", error.strerror)
                continue
            frequencies = recorder._parts[-1]
            for _ in range(50):
                frequencies._due = 0
                recorder.record(step(1, 2))
            print(total(folder), total(folder, catalogue.FAULTS, part=frequencies.name), frequencies.name)
    print(*said, sep="\\n")
"""
TMPFS = 'subprocess.run(["mount", "-t", "tmpfs", "-o", "size={size}k", "tmpfs", str(folder)], check=True)'
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size} * 1024, -1))"


def on_a_small_disk(folder, limit, *namespace):
    """Return what the program says."""
    command = [*namespace, sys.executable, "-c", ON_A_SMALL_DISK.format(limit=limit), str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture
def namespace():
    """What runs a program that may mount file systems of its own."""
    command = ["unshare", "--map-root-user", "--mount"]
    tried = subprocess.run([*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no file system can be mounted here: {tried.stderr.strip()}")
    return command


@pytest.mark.parametrize("size", [12, 512, 1536, 3584])
def test_full_disk_costs_the_counters_only(tmp_path, namespace, size):
    """A real one: without the reservation the process would end with SIGBUS at a store into a page of a file."""
    done = on_a_small_disk(tmp_path, TMPFS.format(size=size), *namespace)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("none: No space left on device\n") == 2
    assert done.stdout.count("refused requests cannot be counted") == 1, "logged once"


def test_disk_that_is_full_later_costs_the_frequencies_only(tmp_path, namespace):
    """There was room for the counters; the file of frequencies, which is written anew each time, fails as a fault."""
    done = on_a_small_disk(tmp_path, TMPFS.format(size=5 * 1024), *namespace)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("100.0 50.0 frequencies\n200.0 100.0 frequencies\n")
    assert "No space left on device" in done.stdout


def test_limit_on_the_size_of_files_costs_the_counters_only(tmp_path):
    done = on_a_small_disk(tmp_path, LIMIT.format(size=100))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("none: File too large\n") == 2


def test_what_dead_processes_left_is_forgotten_and_nothing_else(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    make_recorder(tmp_path).record(step(1, 2))
    ours = {file.name for file in tmp_path.iterdir()}
    others = {f"counter_{dead.pid}.db", "counter_of-gumbel.db", "notes.txt", f"gumbel_{dead.pid}.npz"}
    left = {f"{kind}_{dead.pid}-gumbel.db" for kind in exporter.FILE_KINDS}
    left |= {f"token-frequencies-0_{dead.pid}-gumbel{suffix}" for suffix in (".npz", ".partial")}
    for name in others | left:
        (tmp_path / name).touch()
    exporter.forget_dead(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == ours | others
    for name in others:
        (tmp_path / name).unlink()
    assert total(tmp_path) == 2


def test_two_engines_and_refusals_of_one_process_do_not_overwrite_each_other(tmp_path, monkeypatch):
    """As `LLM` twice in one process: the same labels, the same files."""
    monkeypatch.setenv(PRIVATE_VARIABLE, str(tmp_path))
    first, second = make_recorder(tmp_path), make_recorder(tmp_path)
    for _ in range(5):
        first.record(step(1, 2, 3, watched=watched([0])))
        refusals.count_refusal("a", ("a", "b"))
        second.record(step(4, 5, by_stock=(0,)))
        second.seconds(0.5)
        first.seconds(0.25)
    assert [total(tmp_path, arm=arm) for arm in ARMS] == [20, 5]
    assert total(tmp_path, catalogue.REJECTED_PARAMS, key="a") == 5
    assert total(tmp_path, catalogue.TESTED_TOKENS) == 5
    assert total(tmp_path, catalogue.SAMPLER_SECONDS, "_sum") == 3.75
    assert total(tmp_path, FAULTS) == 0
    assert (first.sampled[GUMBEL].value, second.sampled[GUMBEL].value) == (15, 5), "each knows its own"


def test_worker_answers_scrapes_at_an_address_of_its_own(tmp_path):
    make_recorder(tmp_path).record(step(1, 2, 3))
    port = free_port()
    exporter.serve(tmp_path, f"127.0.0.1:{port - 2}", 2)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    assert f'{SAMPLED_TOKENS.exposed_name}{{arm="gumbel",engine="0",model_name="m"}} 3.0' in lines
    assert not [line for line in lines if line.startswith("process_")], "the folder's metrics and nothing else"
    with pytest.raises(OSError, match="in use"):
        exporter.serve(tmp_path, f"127.0.0.1:{port}", 0)
