"""Counters from the worker to `/metrics`: one table of names, sums over processes, and no harm to the tokens."""

import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import prometheus_client
import pytest
from prometheus_client import values

from tests.recording import BUILD, heard, make_recorder, samples, step, total, watched
from vllm_gumbel.kernels.contract import Flag
from vllm_gumbel.metrics import catalogue, exporter
from vllm_gumbel.metrics.catalogue import ARMS
from vllm_gumbel.metrics.exporter import HOST_VARIABLE, PRIVATE_VARIABLE, FolderCollector, shared_folder, worker_values
from vllm_gumbel.settings import SamplerSettings

SPAWN = multiprocessing.get_context("spawn")
KINDS = ("nonfinite_logits", "no_candidate", "padded_id")
SAMPLED, ANOMALOUS, FAULTS = catalogue.SAMPLED_TOKENS, catalogue.ANOMALOUS_TOKENS, catalogue.FAULTS
BY_ARM = (
    SAMPLED,
    catalogue.REQUESTS,
    catalogue.WATCHED_TOKENS,
    catalogue.EXPECTED_IMPROBABLE,
    catalogue.TESTED_TOKENS,
    catalogue.SURPRISAL,
    catalogue.ENTROPY,
    catalogue.SURPRISAL_VARIANCE,
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A private folder that a parent process chose."""
    monkeypatch.delenv(HOST_VARIABLE, raising=False)
    monkeypatch.setenv(PRIVATE_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def said():
    """The lines that are logged."""
    with heard() as lines:
        yield lines


def work(folder, engine, rows, written=None, may_end=None):
    """Be a worker that draws `rows` rows in two steps, one of them spoiled."""
    recorder = make_recorder(folder, engine)
    recorder.record(step(flags=[0] * (rows - 1)))
    recorder.record(step(flags=[Flag.NONFINITE | Flag.NO_CANDIDATE, 0]), np.array([True, False]))
    if written is not None:
        written.release()
        may_end.wait(60)


def test_names_and_labels_are_unique_and_well_formed():
    names = [metric.exposed_name for metric in catalogue.CATALOGUE]
    assert len(set(names)) == len(names)
    for metric in catalogue.CATALOGUE:
        assert re.fullmatch(r"vllm_gumbel_[a-z0-9_]*[a-z0-9]", metric.exposed_name)
        assert metric.exposed_name.endswith("_total") == (metric.kind == "counter")
        assert metric.kind in ("counter", "gauge", "histogram", "summary")
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help.strip().endswith(".")
        assert len(set(metric.label_names)) == len(metric.label_names)
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in metric.label_names)
        assert not metric.common or metric.label_names[:3] == catalogue.COMMON_LABELS == ("model_name", "engine", "arm")


def expected_at_first(engine):
    """Return every sample that a recorder shows before it has counted anything, as `samples` does."""
    common = {"model_name": "m", "engine": engine}
    found = {(catalogue.BUILD_INFO.exposed_name, frozenset({**common, "arm": "gumbel", **BUILD}.items())): [1.0]}

    def add(metric, arm="gumbel", suffix="", **labels):
        found[metric.exposed_name + suffix, frozenset({**common, "arm": arm, **labels}.items())] = [0.0]

    def add_all(metric, arm="gumbel"):
        for suffix in ("_sum", "_count"):
            add(metric, arm, suffix)
        for bound in (*metric.buckets, float("inf")) if metric.kind == "histogram" else ():
            add(metric, arm, "_bucket", le="+Inf" if np.isinf(bound) else repr(float(bound)))

    for arm in ARMS:
        for metric in BY_ARM:
            add(metric, arm)
        for kind in catalogue.AnomalyKind:
            add(ANOMALOUS, arm, kind=kind)
        for metric in (catalogue.KEPT_TOKENS, catalogue.TOKEN_RUN_LENGTH):
            add_all(metric, arm)
    parts = ("recorder", "time", "counts", "exactness", "loops", "glitches", "frequencies", "summary")
    for part in (*parts, "rollout", "shadow"):
        add(FAULTS, part=part)
    for reason in ("kernel", "breaker", "keys"):
        add(catalogue.FALLBACKS, reason=reason)
    for bin in range(20):
        add(catalogue.SCORE_PIT, bin=str(bin))
    for metric in (catalogue.SCORE_SQUARES, catalogue.SCORE_STEP_SQUARES, catalogue.SCORE_PAIRS):
        add(metric)
    add_all(catalogue.SAMPLER_SECONDS)
    add_all(catalogue.TOP_N_GIVEN_UP)
    return found


def test_recorder_exposes_the_whole_table_from_the_start(folder):
    """Label values that are known are there with 0, so that a rate over them is right from the first increment.

    Not there yet: refusals, which another process counts, divergences, of which 0 would say that there is none, and the
    state of a rollout, which the sampler shows.
    """
    make_recorder(folder, engine=3, glitches=np.zeros(300, bool), summary_seconds=10)
    shown = samples(FolderCollector(folder).collect())
    assert shown == expected_at_first("3")
    rollout = (catalogue.SHADOW_TOKENS, catalogue.ROLLOUT_FRACTION, catalogue.ROLLOUT_SHADOW, catalogue.BREAKER_OPEN)
    later = (catalogue.REJECTED_PARAMS, catalogue.TOKEN_FREQUENCY_KL, *rollout)
    by_name = {metric.exposed_name: metric for metric in catalogue.CATALOGUE if metric not in later}
    for name, labels in shown:
        metric = by_name[re.sub("_(count|sum|bucket)$", "", name)]
        assert {label for label, _ in labels} - {"le"} == set(metric.label_names)
    assert set(by_name) == {re.sub("_(count|sum|bucket)$", "", name) for name, _ in shown}


def test_what_is_switched_off_is_not_shown(folder):
    off = dict.fromkeys(("watch_loops", "watch_glitches", "watch_frequencies", "watch_time"), False)
    recorder = make_recorder(folder, settings=SamplerSettings(watch=0, **off))
    recorder.record(step(1, 2, watched=watched([0])))
    recorder.seconds(1.0)
    shown = samples(FolderCollector(folder).collect())
    kept = (
        SAMPLED,
        ANOMALOUS,
        FAULTS,
        catalogue.FALLBACKS,
        catalogue.REQUESTS,
        catalogue.TOP_N_GIVEN_UP,
        catalogue.BUILD_INFO,
    )
    assert {re.sub("_(count|sum)$", "", name) for name, _ in shown} == {metric.exposed_name for metric in kept}
    assert (total(folder), total(folder, FAULTS)) == (2, 0)


def test_steps_are_counted_by_kind_and_discarded_rows_are_not(folder, said):
    recorder = make_recorder(folder)
    recorder.record(step(flags=[0, 0, 0]))
    recorder.record(step(flags=[Flag.NONFINITE, Flag.NONFINITE | Flag.NO_CANDIDATE, Flag.PADDED, 0]))
    recorder.record(step(flags=[Flag.NONFINITE, Flag.PADDED]), np.array([False, True]))
    recorder.record(step())
    assert total(folder) == 8
    assert [total(folder, ANOMALOUS, kind=kind) for kind in KINDS] == [2, 1, 2]
    assert total(folder, FAULTS) == 0
    assert len(said) == 3, "each kind is said once, not once a step"


def test_workers_add_up_and_what_a_dead_one_counted_stays(folder):
    """LMCache#621: other processes count, this one shows; two engines are kept apart by their label."""
    written, may_end = SPAWN.Semaphore(0), SPAWN.Event()
    workers = [
        SPAWN.Process(target=work, args=(folder, engine, rows, written, may_end)) for engine, rows in ((0, 5), (1, 8))
    ]
    for worker in workers:
        worker.start()
    assert all(written.acquire(timeout=120) for _ in workers)
    assert all(worker.is_alive() for worker in workers)
    assert (total(folder), total(folder, engine="0"), total(folder, engine="1")) == (13, 5, 8)
    may_end.set()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert total(folder) == 13
    work(folder, 1, 20)
    assert (total(folder), total(folder, engine="1")) == (33, 28)
    assert [total(folder, ANOMALOUS, kind=kind) for kind in KINDS] == [3, 3, 0]
    assert total(folder, catalogue.BUILD_INFO, engine="1") == 1, "a gauge is not summed over processes"


def test_workers_counters_are_shown_once_and_survive_vllms_clean_up(folder, monkeypatch):
    """vLLM unregisters its own collectors when its logger starts, after ours was added."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry, unregister_vllm_metrics

    from vllm_gumbel.integration import plugin

    monkeypatch.setattr(plugin, "_shown_folders", set())
    before = set(prometheus_client.REGISTRY._collector_to_names)
    make_recorder(folder).record(step(flags=[0, 0]))
    try:
        for _engine in range(2):
            plugin._show_metrics()
            unregister_vllm_metrics()
        shown = samples(get_prometheus_registry().collect()).items()  # an engine of this process shows its own too
        tokens = [(labels, each) for (name, labels), each in shown if name == SAMPLED.exposed_name]
        ours = [each for labels, each in tokens if ("model_name", "m") in labels]
        assert ours == [[2.0], [0.0]]
        text = prometheus_client.generate_latest(get_prometheus_registry()).decode()
        assert f'{SAMPLED.exposed_name}{{arm="gumbel",engine="0",model_name="m"}} 2.0' in text
    finally:
        now = set(prometheus_client.REGISTRY._collector_to_names)
        for each in now ^ before:  # those of an engine in this process come back
            (prometheus_client.REGISTRY.unregister if each in now else prometheus_client.REGISTRY.register)(each)


def work_in_host_mode(rows):
    """Be a worker in a server whose processes all write to one folder: vLLM's metrics and ours."""
    prometheus_client.Counter("of_the_host", "x").inc(100)
    work(shared_folder(), 0, rows)
    prometheus_client.Counter("of_the_host_too", "x").inc(7)


def test_with_a_folder_of_the_host_everything_is_shown_once(tmp_path, monkeypatch):
    """vllm#18053: with several API servers vLLM's registry reads one folder, and so it does with ours."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    from vllm_gumbel.integration import plugin

    host = tmp_path / "host"
    host.mkdir()
    monkeypatch.setenv(HOST_VARIABLE, str(host))
    before = set(prometheus_client.REGISTRY._collector_to_names)
    for rows in (5, 8):
        worker = SPAWN.Process(target=work_in_host_mode, args=(rows,))
        worker.start()
        worker.join(120)
        assert worker.exitcode == 0
    plugin._show_metrics()
    assert set(prometheus_client.REGISTRY._collector_to_names) == before, "the host shows the folder already"
    shown = samples(get_prometheus_registry().collect())
    assert {len(each) for each in shown.values()} == {1}
    sums = {name: sum(sum(each) for (have, _), each in shown.items() if have == name) for name, _ in shown}
    assert [sums[each.exposed_name] for each in (SAMPLED, FAULTS, catalogue.BUILD_INFO)] == [13, 0, 1]
    theirs = {name: value for name, value in sums.items() if not name.startswith(catalogue.PREFIX)}
    assert theirs == {"of_the_host_total": 200.0, "of_the_host_too_total": 14.0}
    assert not list(tmp_path.glob("*.db")), "the private folder is not used"


@pytest.mark.parametrize("host", [None, "/somewhere"])
def test_the_process_keeps_its_own_kind_of_values(host, folder, monkeypatch):
    if host is not None:
        monkeypatch.setenv(HOST_VARIABLE, host)
    kind, environment = values.ValueClass, dict(os.environ)
    with worker_values(folder):
        assert values.ValueClass is not kind
    make_recorder(folder)
    with pytest.raises(KeyError), worker_values(folder):
        raise KeyError
    with pytest.raises(OSError, match="absent"):
        make_recorder(folder / "absent")
    assert values.ValueClass is kind
    assert dict(os.environ) == environment
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Counter("of_somebody_else", "x", registry=registry).inc()
    assert not any("of_somebody_else" in path.read_bytes().decode("latin1") for path in folder.glob("*.db"))


def test_tokens_flow_when_nothing_can_be_counted(folder, said):
    from tests.test_v1_sampler import batch_of, draw, mixed, random_logits, tokens_of
    from vllm_gumbel.integration.v1 import GumbelSampler

    batch, logits = batch_of(mixed(7)), random_logits(7)
    sampler = GumbelSampler(recorder=make_recorder(folder))
    sampler.recorder.sampled.clear()
    assert tokens_of(sampler(logits.clone(), batch.sampling_metadata)) == draw(logits, batch)
    assert total(folder, FAULTS) == 1
    assert any("KeyError" in line for line in said)


def test_sampler_counts_what_is_sent_by_kind(folder):
    """Draws that vLLM discards, of prompts not yet complete, are not counted; nor are rows of no batch."""
    import torch
    from vllm.v1.utils import CpuGpuBuffer

    from tests.test_rows import detached
    from tests.test_v1_sampler import batch_of, random_logits, spoiled
    from vllm_gumbel.integration.v1 import GumbelSampler

    sampler = GumbelSampler(recorder=make_recorder(folder), usable_vocab=290)
    batch = batch_of([{"temperature": 1.0, "seed": i} for i in range(19)])
    bad, _ = spoiled(random_logits(19))
    bad[0, 295] = 100.0  # a padded id that would have won
    sampler(bad.clone(), batch.sampling_metadata)  # not bound to a runner: everything is sent
    assert total(folder) == 19
    assert [total(folder, ANOMALOUS, kind=kind) for kind in KINDS] == [8, 4, 2]
    discarded = CpuGpuBuffer(32, dtype=torch.bool, device=torch.device("cpu"), pin_memory=False)
    discarded.np[:19] = np.arange(19) < 10
    one = SimpleNamespace(tensor_parallel_size=1)
    sampler.bind(SimpleNamespace(discard_request_mask=discarded, input_batch=batch, parallel_config=one))
    sampler(bad.clone(), batch.sampling_metadata)
    sampler(random_logits(4), detached(4))
    assert total(folder) == 19 + 9
    assert total(folder, FAULTS) == 0


@pytest.fixture(scope="module")
def worker_config(model_path):
    """The configuration of a worker with the default model, and its groups of ranks."""
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from tests.serving import free_port

    config = VllmConfig(
        model_config=ModelConfig(str(model_path), dtype="float32", served_model_name=["shown", "other"]),
        additional_config={"sampler": "gumbel", "sampler_config": {"backend": "reference"}},  # nothing to compile
    )
    with set_current_vllm_config(config):
        address = f"tcp://127.0.0.1:{free_port()}"
        parallel_state.init_distributed_environment(1, 0, address, 0, backend="gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
        yield config
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def test_worker_counts_under_the_served_name_and_says_what_draws(worker_config, folder, said):
    from vllm_gumbel.integration.v1 import GumbelSampler

    sampler = GumbelSampler.from_vllm_config(worker_config)
    sampler.recorder.record(step(flags=[0]))
    assert total(folder, model_name="shown", engine="0", arm="gumbel") == 1
    assert total(folder, catalogue.BUILD_INFO, backend="reference", noise_version="1", runner="v1") == 1
    assert any("draws with backend 'reference'" in line for line in said)


@pytest.mark.parametrize(("place", "reason"), [("absent", "No such file or directory"), ("a file", "Not a directory")])
def test_folder_that_cannot_be_written_costs_the_counters_only(place, reason, worker_config, folder, said, monkeypatch):
    from vllm_gumbel.integration.v1 import GumbelSampler

    (folder / "a file").touch()
    monkeypatch.setenv(PRIVATE_VARIABLE, str(folder / place / "folder"))
    assert GumbelSampler.from_vllm_config(worker_config).recorder is None
    (line,) = (line for line in said if "nothing will be counted" in line)
    assert reason in line
    assert str(folder / place / "folder") in line


def test_removed_folder_shows_nothing_and_is_logged_once(folder, said):
    collector = FolderCollector(folder / "removed")
    assert [list(collector.collect()) for _ in range(3)] == [[], [], []]
    assert len(said) == 1
    assert str(folder / "removed") in said[0]


BROKEN = {
    "empty": b"",
    "cut": b"\x40",
    "entry past the end": b"\x40\0\0\0\0\0\0\0\xe8\x03\0\0" + bytes(52),
    "no JSON": b"\x28\0\0\0\0\0\0\0\x0c\0\0\0no JSON here" + bytes(16),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_broken_file_does_not_end_the_scrape(content, folder, said):
    """A worker that is killed between making its file and filling it leaves an empty one; vLLM's metrics go on."""
    make_recorder(folder)
    (folder / "counter_1-gumbel.db").write_bytes(content)
    collector = FolderCollector(folder)
    for _ in range(2):
        list(collector.collect())
    assert len(said) == 1
    (folder / "counter_1-gumbel.db").unlink()
    assert SAMPLED.exposed_name in {name for name, _ in samples(collector.collect())}


def test_collector_has_no_name_by_which_vllm_would_find_it():
    assert not hasattr(FolderCollector(Path()), "_name")
    assert list(FolderCollector(Path()).describe()) == []


def test_temporary_folder_is_removed_by_its_owner_only():
    """Forked children inherit the exit hook, started ones the environment; neither removes what is not its own."""
    script = """if True:
        import os, subprocess, sys
        from vllm_gumbel.metrics.exporter import shared_folder
        folder = shared_folder()
        assert shared_folder() == folder and folder.stat().st_mode & 0o777 == 0o700
        if os.fork() == 0:
            sys.exit()
        os.wait()
        child = "from vllm_gumbel.metrics.exporter import shared_folder; print(shared_folder())"
        assert subprocess.check_output([sys.executable, "-c", child], text=True).strip() == str(folder)
        print(folder, folder.is_dir())
    """
    environment = {k: v for k, v in os.environ.items() if k not in (HOST_VARIABLE, PRIVATE_VARIABLE)}
    here = Path(__file__).parents[1]
    output = subprocess.check_output([sys.executable, "-c", script], text=True, env=environment, cwd=here)
    folder, existed = output.split()
    assert (existed, "vllm-gumbel-metrics-" in folder) == ("True", True)
    assert not Path(folder).exists()


def test_host_folder_wins_over_the_private_one(folder, monkeypatch):
    assert (shared_folder(), exporter.host_shows_folder()) == (folder, False)
    monkeypatch.setenv(HOST_VARIABLE, "/host")
    assert (shared_folder(), exporter.host_shows_folder()) == (Path("/host"), True)
