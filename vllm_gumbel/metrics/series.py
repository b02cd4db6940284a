"""The counters, gauges and histograms of one worker, made from the catalogue, in files that `/metrics` reads."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import Counter, Gauge, Histogram, Summary

from vllm_gumbel.metrics.catalogue import GUMBEL, PREFIX, Metric
from vllm_gumbel.metrics.exporter import worker_values


class Total:
    """A counter that also knows its own value, since the process that counts writes the log's summary too."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add an amount.

        Raises:
            ValueError: it is negative or no number.
        """
        if not amount >= 0:
            raise ValueError(f"a counter can grow by a number from 0 on, got {amount}")
        if amount:
            self._counter.inc(amount)
            self.value += amount


class Distribution:
    """A histogram to which a step's values are added at once, with a write a bucket instead of two a value.

    prometheus_client adds values one by one only, which for the 64 of a step takes a quarter of a millisecond; so this
    goes to the parts of its histogram, and a test holds it to what `observe` does.

    Args:
        histogram: with labels.
        bounds: its buckets, without infinity.
    """

    def __init__(self, histogram: Any, bounds: Sequence[float]) -> None:
        self._buckets, self._sum = histogram._buckets, histogram._sum
        self._bounds = np.array([*bounds, np.inf])

    def add(self, values: npt.NDArray[np.int64]) -> None:
        """Add values, at least 0."""
        if len(values):
            counts = np.bincount(np.searchsorted(self._bounds, values))
            for bucket in np.flatnonzero(counts):
                self._buckets[bucket].inc(int(counts[bucket]))
            self._sum.inc(float(values.sum()))


class Series:
    """Makes what a worker counts with, each with the worker's labels.

    Args:
        folder: where the values live (`exporter.shared_folder`).
        model_name: label.
        engine: label; the index of the data-parallel replica.
    """

    def __init__(self, folder: Path, *, model_name: str, engine: int) -> None:
        self.folder = folder
        self._common = {"model_name": model_name, "engine": str(engine)}

    def counter(self, metric: Metric, arm: str = GUMBEL, **labels: str) -> Total:
        """Return a counter at 0."""
        return Total(self._child(Counter, metric, arm, labels))

    def gauge(self, metric: Metric, arm: str = GUMBEL, **labels: str) -> Gauge:
        """Return a gauge; of a worker and its successor the last that wrote is shown."""
        return self._child(Gauge, metric, arm, labels, multiprocess_mode="mostrecent")

    def histogram(self, metric: Metric, arm: str = GUMBEL, **labels: str) -> Histogram:
        """Return an empty histogram."""
        return self._child(Histogram, metric, arm, labels, buckets=metric.buckets)

    def distribution(self, metric: Metric, arm: str = GUMBEL, **labels: str) -> Distribution:
        """Return an empty histogram for many values a step."""
        return Distribution(self.histogram(metric, arm, **labels), metric.buckets)

    def summary(self, metric: Metric, arm: str = GUMBEL, **labels: str) -> Summary:
        """Return an empty summary."""
        return self._child(Summary, metric, arm, labels)

    def _child(self, kind: Any, metric: Metric, arm: str, labels: dict[str, str], **options: Any) -> Any:
        made = _made(self.folder)
        with worker_values(self.folder):
            if metric.name not in made:
                made[metric.name] = kind(*definition(metric), registry=None, **options)  # the files are what is read
            return made[metric.name].labels(**self._common, arm=arm, **labels)


@cache
def _made(folder: Path) -> dict[str, Any]:
    """Return this process's metrics in a folder by name; two of one name would write over each other's values."""
    return {}


def definition(metric: Metric) -> tuple[str, str, tuple[str, ...]]:
    """Return name, help and labels of a metric as prometheus_client takes them."""
    return PREFIX + metric.name, metric.help, metric.label_names
