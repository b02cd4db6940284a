"""Writes files that are there as a whole or not at all, whatever happens meanwhile."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` when the context ends; if that fails, nothing of it is left.

    Raises:
        OSError: the folder cannot be written, or its disk is full.
    """
    partial = path.with_name(f"partial-{os.getpid()}-{path.name}")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
