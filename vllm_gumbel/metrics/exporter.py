"""From the worker to `/metrics`: counters in memory-mapped files of a private folder.

The worker that draws and the process that answers `/metrics` are different processes. prometheus_client has a format for
that, one memory-mapped file per process and type, made for forked web servers: the writer pays a memory store per
increment, the reader sums the files, and what a dead worker counted stays counted. It is used here for our own metrics
only, in a folder of our own, whatever mode the host process runs prometheus_client in: `worker_values` hands the file
backed values to the metrics built inside it, and `FolderCollector` reads the folder when scraped.
"""

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import Metric, values
from prometheus_client.multiprocess import MultiProcessCollector

logger = logging.getLogger("vllm.gumbel")

_LIBRARY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

#: How a folder chosen by one process reaches those it starts.
FOLDER_VARIABLE = "GUMBEL_METRICS_DIRECTORY"


def shared_folder(chosen: Path | None = None) -> Path:
    """Return the folder through which this process and those it starts exchange counters.

    Args:
        chosen: a folder to use; None takes the one that a parent process chose, or makes a temporary one, which the
            process that made it removes when it exits.

    Raises:
        OSError: the folder cannot be made.
    """
    if chosen is None and FOLDER_VARIABLE in os.environ:
        chosen = Path(os.environ[FOLDER_VARIABLE])
    if chosen is None:
        chosen = Path(tempfile.mkdtemp(prefix="vllm-gumbel-metrics-"))
        atexit.register(_remove, chosen, os.getpid())
    chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ[FOLDER_VARIABLE] = str(chosen)
    return chosen


@contextmanager
def worker_values(folder: Path) -> Iterator[None]:
    """Back every metric child that is built inside this context by this process's files in `folder`."""
    before_class, before_folder = values.ValueClass, os.environ.get(_LIBRARY_VARIABLE)
    os.environ[_LIBRARY_VARIABLE] = str(folder)
    values.ValueClass = values.MultiProcessValue()
    try:
        yield
    finally:
        values.ValueClass = before_class
        if before_folder is None:
            del os.environ[_LIBRARY_VARIABLE]
        else:
            os.environ[_LIBRARY_VARIABLE] = before_folder


class FolderCollector:
    """Collector of the sum of all workers' files in a folder.

    It has no `_name`, since vLLM unregisters collectors by that attribute when its own logger starts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._failed = False

    def describe(self) -> Iterable[Metric]:
        """Return nothing: which metrics there are is known when a worker has written them."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of all workers; nothing, logged once, when the folder cannot be read."""
        try:
            return list(MultiProcessCollector(None, path=str(self._folder)).collect())
        except (OSError, ValueError) as error:
            if not self._failed:
                logger.warning("vllm-gumbel metrics cannot be read from %s: %s", self._folder, error)
            self._failed = True
            return []


def _remove(folder: Path, owner: int) -> None:
    """Remove the temporary folder, in the process that made it only (a forked child inherits the exit hook)."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
