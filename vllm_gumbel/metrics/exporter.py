"""From the worker to `/metrics`: counters in memory-mapped files of a folder.

The worker that draws and the process that answers `/metrics` are different processes. prometheus_client has a format
for that, one memory-mapped file per process and type, made for forked web servers: the writer pays a memory store per
increment, the reader sums the files, and what a dead worker counted stays counted.

A file's space is reserved before it is mapped: a store into a mapped page that a full disk cannot back would end the
process, while a reservation that fails is an error at start-up, and tokens are drawn without counters.

With several API servers vLLM puts all its processes into that mode, in a folder of its own, and `/metrics` shows
whatever lies there: our files go there too. With one API server, and for `LLM`, it does not: then only our own metrics
use the format, in a private folder that `FolderCollector` reads.
"""

import atexit
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, start_http_server, values
from prometheus_client.multiprocess import MultiProcessCollector

logger = logging.getLogger("vllm.gumbel")

#: Set by vLLM or its user: every process writes its metrics to this folder, and `/metrics` shows the folder.
HOST_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

#: How the private folder chosen by one process reaches those it starts.
PRIVATE_VARIABLE = "GUMBEL_METRICS_DIRECTORY"

#: Bytes of a process's file for one type of metric: as many as prometheus_client starts with, ten times what we need.
FILE_BYTES = 2**20

#: Starts of the names that prometheus_client gives these files.
FILE_KINDS = ("counter", "histogram", "summary", "gauge_mostrecent")


def host_shows_folder() -> bool:
    """Return whether `/metrics` shows the shared folder without our doing."""
    return HOST_VARIABLE in os.environ


def shows_folder() -> bool:
    """Return whether this process, or one that started it, has chosen a folder to exchange counters through."""
    return host_shows_folder() or PRIVATE_VARIABLE in os.environ


def shared_folder() -> Path:
    """Return the folder through which this process and those it starts exchange counters.

    That is the host's, else the private one that a parent process chose, else a new temporary one, which this process
    removes when it exits.

    Raises:
        OSError: the folder cannot be made.
    """
    if host_shows_folder():
        return Path(os.environ[HOST_VARIABLE])
    if PRIVATE_VARIABLE not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="vllm-gumbel-metrics-"))
        atexit.register(_remove, folder, os.getpid())
        os.environ[PRIVATE_VARIABLE] = str(folder)
    return Path(os.environ[PRIVATE_VARIABLE])


def forget_dead(folder: Path) -> None:
    """Remove what processes of an earlier server, which are gone, left in a folder that outlives servers."""
    for file in folder.glob("*-gumbel.*"):
        process = file.stem.removesuffix("-gumbel").rsplit("_", 1)[-1]
        if process.isdigit() and not Path("/proc", process).exists():
            file.unlink(missing_ok=True)


def reserve(folder: Path) -> None:
    """Make this process's files in `folder`, with their space on the disk.

    Raises:
        OSError: the folder cannot be written, or its disk is full.
    """
    for kind in FILE_KINDS:
        file = folder / f"{kind}_{identity()}.db"
        if not file.exists():
            try:
                with file.open("xb") as opened:
                    os.posix_fallocate(opened.fileno(), 0, FILE_BYTES)
            except OSError:
                file.unlink(missing_ok=True)  # or the next call would take it for one that has its space
                raise


def serve(folder: Path, address: str, replica: int) -> None:
    """Answer scrapes of a folder in a thread of this process.

    Args:
        folder: with the workers' files.
        address: HOST:PORT.
        replica: added to the port.

    Raises:
        OSError: the address cannot be listened at.
    """
    host, port = address.rsplit(":", 1)
    registry = CollectorRegistry()
    registry.register(FolderCollector(folder))
    start_http_server(int(port) + replica, addr=host, registry=registry)


def identity() -> str:
    """Return what tells this process's files from those of others; `forget_dead` reads it."""
    return f"{os.getpid()}-gumbel"


@contextmanager
def worker_values(folder: Path) -> Iterator[None]:
    """Back every metric child that is built inside this context by this process's files in `folder`.

    The files are named apart from those that the process's other metrics may have in the same folder.
    """
    reserve(folder)
    before_class, before_folder = values.ValueClass, os.environ.get(HOST_VARIABLE)
    os.environ[HOST_VARIABLE] = str(folder)
    values.ValueClass = _value_class(folder)
    try:
        yield
    finally:
        values.ValueClass = before_class
        if before_folder is None:
            del os.environ[HOST_VARIABLE]
        else:
            os.environ[HOST_VARIABLE] = before_folder


@cache
def _value_class(folder: Path) -> type:
    """Return the class of values in a folder's files, one for the process: two would write over each other."""
    return values.MultiProcessValue(identity)


class FolderCollector:
    """Collector of the sum of all workers' files in a folder.

    It has no `_name`, since vLLM unregisters collectors by that attribute when its own logger starts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._failed = False
        self._lock = threading.Lock()  # scrapes may come at the same time, and none answers before the line is logged

    def describe(self) -> Iterable[Metric]:
        """Return nothing: which metrics there are is known when a worker has written them."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of all workers; nothing, logged once, when the folder cannot be read."""
        try:
            return list(MultiProcessCollector(None, path=str(self._folder)).collect())
        except Exception as error:  # a file cut short fails in many ways, and the scrape has other metrics to show
            with self._lock:
                if not self._failed:
                    logger.warning("vllm-gumbel metrics cannot be read from %s: %r", self._folder, error)
                self._failed = True
            return []


def _remove(folder: Path, owner: int) -> None:
    """Remove the temporary folder, in the process that made it only (a forked child inherits the exit hook)."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
