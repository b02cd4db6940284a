"""Counts what a worker draws; called once a step with plain numbers, never raising into the serving loop."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Gauge, Summary

from vllm_gumbel.kernels.contract import Flag
from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import AnomalyKind
from vllm_gumbel.metrics.exporter import worker_values

logger = logging.getLogger("vllm.gumbel")

_KIND_OF_FLAG = {
    Flag.NONFINITE: AnomalyKind.NONFINITE_LOGITS,
    Flag.NO_CANDIDATE: AnomalyKind.NO_CANDIDATE,
    Flag.PADDED: AnomalyKind.PADDED_ID,
}


class Recorder:
    """The counters of one worker.

    Args:
        folder: where the counters live (`exporter.shared_folder`).
        model_name: label.
        engine: label; the index of the data-parallel replica.
        build: values of the labels of `build_info`.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, model_name: str, engine: int, build: dict[str, str]) -> None:
        common = {"model_name": model_name, "engine": str(engine), "arm": "gumbel"}
        registry = CollectorRegistry()  # keeps our names out of the process's own registry; the files are what is read
        with worker_values(folder):
            sampled = Counter(*definition(catalogue.SAMPLED_TOKENS), registry=registry)
            anomalous = Counter(*definition(catalogue.ANOMALOUS_TOKENS), registry=registry)
            faults = Counter(*definition(catalogue.FAULTS), registry=registry)
            given_up = Summary(*definition(catalogue.TOP_N_GIVEN_UP), registry=registry)
            info = Gauge(*definition(catalogue.BUILD_INFO), registry=registry, multiprocess_mode="max")
            self._sampled = sampled.labels(**common)
            self._sampled_by_stock = sampled.labels(**common | {"arm": "default"})
            self._given_up = given_up.labels(**common)
            self._anomalous = {flag: anomalous.labels(**common, kind=kind) for flag, kind in _KIND_OF_FLAG.items()}
            self._faults = faults.labels(**common, part="recorder")
            info.labels(**common, **build).set(1)
        self._reported: set[str] = set()

    def step(self, flags: npt.NDArray[np.uint8], sent: npt.NDArray[np.bool_] | None) -> None:
        """Count one step.

        Args:
            flags: uint8 [rows], bits of `contract.Flag`.
            sent: bool [rows], rows whose token goes to the client; None means all.
        """
        try:
            self._count(flags if sent is None else flags[sent])
        except Exception as error:  # whatever it is, the tokens must flow
            self._fault(error)

    def keyed(self, stock_rows: int, given_up: Sequence[float]) -> None:
        """Count what only rows of requests with keys have.

        Args:
            stock_rows: how many rows vLLM's own sampler drew.
            given_up: shares of mass that `gumbel_top_n` gave up.
        """
        try:
            self._sampled_by_stock.inc(stock_rows)
            for share in given_up:
                self._given_up.observe(share)
        except Exception as error:  # as in `step`
            self._fault(error)

    def _count(self, flags: npt.NDArray[np.uint8]) -> None:
        self._sampled.inc(len(flags))
        if not flags.any():
            return
        for flag, counter in self._anomalous.items():
            rows = int(np.count_nonzero(flags & flag))
            if rows:
                counter.inc(rows)
                self._once(str(flag.name), "%d rows of a step: %s", rows, _KIND_OF_FLAG[flag].value)

    def _fault(self, error: Exception) -> None:
        self._once(f"fault {type(error).__name__}", "counting failed, tokens keep flowing: %r", error)
        try:
            self._faults.inc()
        except Exception as second:
            self._once("fault counter", "the fault itself could not be counted: %r", second)

    def _once(self, key: str, message: str, *arguments: object) -> None:
        """Log a warning the first time that `key` is seen."""
        if key not in self._reported:
            self._reported.add(key)
            logger.warning(f"vllm-gumbel: {message} (further ones are counted, not logged)", *arguments)


def definition(metric: catalogue.Metric) -> tuple[str, str, tuple[str, ...]]:
    """Return name, help and labels of a metric as prometheus_client takes them."""
    return catalogue.PREFIX + metric.name, metric.help, metric.label_names
