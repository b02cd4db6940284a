"""Counts requests that were refused for a parameter, in the process that answers clients."""

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter

from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.exporter import shared_folder, shows_folder, worker_values
from vllm_gumbel.metrics.series import definition

logger = logging.getLogger("vllm.gumbel")

#: Label of a key that a client made up; its own name would let clients make labels without end.
UNKNOWN = "unknown"


def count_refusal(key: str, known: Sequence[str]) -> None:
    """Count a refused request; never raises, and does nothing in a process whose counters nobody shows.

    Args:
        key: what was refused.
        known: every key that there is, the same at every call.
    """
    if not shows_folder():
        return
    try:
        counters = _counters(shared_folder(), tuple(known))
        counters.get(key, counters[UNKNOWN]).inc()
    except Exception as error:  # the client must get its answer
        _warn(repr(error))


@cache
def _warn(error: str) -> None:
    """Say once what keeps refusals from being counted; who sends them must not fill the log."""
    logger.warning("vllm-gumbel: refused requests cannot be counted (further ones are not logged): %s", error)


@cache
def _counters(folder: Path, known: tuple[str, ...]) -> dict[str, Counter]:
    """Return this process's counters in a folder by key; all of them, so that rates are right from the first on."""
    with worker_values(folder):
        counter = Counter(*definition(catalogue.REJECTED_PARAMS), registry=CollectorRegistry())
        return {key: counter.labels(key=key) for key in (*known, UNKNOWN)}
