"""What the tests of counting share: steps as a worker tells the recorder of them, and what a folder shows of them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import numpy as np

from vllm_gumbel.kernels.statistics import RowStatistics
from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.exporter import FolderCollector
from vllm_gumbel.metrics.recorder import Recorder
from vllm_gumbel.metrics.step import Step, Watched

BUILD = {"version": "1", "noise_version": "1", "backend": "reference", "runner": "v1", "vllm_version": "0"}
VOCAB, SLOTS = 300, 32

#: What a row has whose law is known and which was drawn from it.
ORDINARY = {
    "kept": 10,
    "log_total": 0.0,
    "surprisal": 1.0,
    "entropy": 1.25,
    "variance": 0.5,
    "score": 0.25,
    "log_probability": -1.0,
    "improbable_mass": 0.125,
}


def make_recorder(folder, engine=0, **options):
    """Return a recorder with labels of its own."""
    return Recorder(folder, model_name="m", engine=engine, build=BUILD, **{"vocab": VOCAB, "slots": SLOTS, **options})


def step(*tokens, flags=None, slots=None, by_stock=(), **others):
    """Return a step; `by_stock` lists rows. Without tokens there are as many rows as flags."""
    rows = len(tokens) if flags is None else len(flags)
    return Step(
        tokens=np.array(tokens or [0] * rows, np.int64),
        flags=np.zeros(rows, np.uint8) if flags is None else np.array(flags, np.uint8),
        slots=np.arange(rows) if slots is None else np.array(slots, np.int64),
        by_stock=np.isin(np.arange(rows), by_stock),
        **others,
    )


def watched(index, *rows, tested=True):
    """Return what was seen in the rows `index`: `rows` says where one differs from `ORDINARY`; `tested` one or all."""
    rows = [ORDINARY | dict(row) for row in (rows or [{}] * len(index))]
    columns = {
        f.name: np.array([row[f.name] for row in rows], np.int64 if f.name == "kept" else np.float64)
        for f in fields(RowStatistics)
    }
    index = np.array(index, np.int64)
    return Watched(index, RowStatistics(**columns), np.broadcast_to(np.array(tested, bool), index.shape).copy())


def samples(metrics):
    """Return every sample once for each time that it is shown: (name, labels) -> values."""
    found = {}
    for metric in metrics:
        for sample in metric.samples:
            found.setdefault((sample.name, frozenset(sample.labels.items())), []).append(sample.value)
    return found


def total(folder, metric=catalogue.SAMPLED_TOKENS, suffix="", **labels):
    """Return the sum of a metric's samples in a folder whose labels include `labels`."""
    shown = samples(FolderCollector(folder).collect())
    name = metric.exposed_name + suffix
    return sum(sum(each) for (found, have), each in shown.items() if found == name and labels.items() <= set(have))


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect the lines that are logged; once vLLM has set up its loggers they do not reach pytest's own fixture."""
    lines, logger, handler = [], logging.getLogger("vllm.gumbel"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


class Counted:
    """A recorder that keeps what it is given.

    Attributes:
        steps: each step with the rows that are sent, bool [rows], or None.
        faults: part and error of each fault.
    """

    def __init__(self):
        self.steps, self.faults, self.durations = [], [], []

    def record(self, step, sent=None):
        """Keep one step."""
        self.steps.append((step, sent))

    def seconds(self, duration):
        """Keep the time of a step."""
        self.durations.append(duration)

    def fault(self, part, error):
        """Keep an error in the bookkeeping."""
        self.faults.append((part, error))
