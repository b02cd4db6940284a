"""How often each token was drawn, by arm: KL between the arms and from a stored profile.

A profile is a JSON file that `vllm-gumbel profile` writes from a worker's counts. `/metrics` could not carry a series
per token, so counts go to a file of the metrics folder, and only the divergences to `/metrics`.

KL(P || Q) in nats, each count plus a half over the ids seen in either (Krichevsky and Trofimov 1981), so that an id
seen on one side only is no infinity. Two samples of one distribution give about (K - 1) / 2 (1 / n + 1 / m), with K ids
seen and n and m tokens: a floor to compare with, which the README states.
"""

import itertools
import json
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from prometheus_client import Gauge

from vllm_gumbel.metrics import catalogue, exporter
from vllm_gumbel.metrics.catalogue import ARMS, DEFAULT, GUMBEL
from vllm_gumbel.metrics.files import written_whole
from vllm_gumbel.metrics.series import Series
from vllm_gumbel.metrics.step import Step

#: Seconds between two looks at the counts.
INTERVAL = 10.0

#: Tokens below which an arm's frequencies are not compared.
LEAST_TOKENS = 1000

_NAME = "token-frequencies"
_numbers = itertools.count()  # a process may hold several engines, one after the other or at once


class ProfileError(ValueError):
    """A profile cannot be read, written or compared; the message says why."""


class Frequencies:
    """Counts of every id, by arm.

    Args:
        series: makes the gauges.
        vocab: vocabulary size.
        profile: path of a stored profile; None for none.
        clock: returns seconds that never go back.

    Raises:
        ProfileError: the profile cannot be read, or is of another vocabulary.
    """

    name = "frequencies"

    def __init__(
        self, series: Series, vocab: int, profile: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._series, self._clock, self._due = series, clock, clock() + INTERVAL
        self._counts = {arm: np.zeros(vocab, np.int64) for arm in ARMS}
        self._file = series.folder / f"{_NAME}-{next(_numbers)}_{exporter.identity()}.npz"
        self._stored = None if profile is None else read_profile(Path(profile), vocab)
        self._gauges: dict[tuple[str, str], Gauge] = {}

    def record(self, step: Step) -> None:
        """Count a step."""
        for arm, mine in step.by_arm():
            np.add.at(self._counts[arm], step.tokens[mine], 1)
        if self._clock() >= self._due:
            self._due = self._clock() + INTERVAL
            self.publish()

    def publish(self) -> None:
        """Write the counts to their file, and the divergences to their gauges."""
        with written_whole(self._file) as file:
            np.savez(file, gumbel=self._counts[GUMBEL], default=self._counts[DEFAULT])
        references = {DEFAULT: self._counts[DEFAULT]} | ({} if self._stored is None else {"profile": self._stored})
        for arm in ARMS:
            for name, reference in references.items():
                if arm != name and min(self._counts[arm].sum(), reference.sum()) >= LEAST_TOKENS:
                    self._gauge(arm, name).set(divergence(self._counts[arm], reference))

    def _gauge(self, arm: str, reference: str) -> Gauge:
        if (arm, reference) not in self._gauges:  # made late, since 0 would say that there is no difference
            gauge = self._series.gauge(catalogue.TOKEN_FREQUENCY_KL, arm, reference=reference)
            self._gauges[arm, reference] = gauge
        return self._gauges[arm, reference]


def divergence(counts: npt.NDArray[np.int64], reference: npt.NDArray[np.int64]) -> float:
    """Return KL in nats of `counts` from `reference`, int64 [vocab] each, smoothed as the module says."""
    seen = (counts > 0) | (reference > 0)
    p, q = counts[seen] + 0.5, reference[seen] + 0.5
    p, q = p / p.sum(), q / q.sum()
    return max(0.0, float((p * np.log(p / q)).sum()))


def counts_of_folder(folder: Path, arm: str = GUMBEL) -> npt.NDArray[np.int64]:
    """Return, int64 [vocab], the counts of all workers that wrote to a metrics folder.

    Raises:
        ProfileError: there are none, or they cannot be read.
    """
    files = sorted(folder.glob(f"{_NAME}-*.npz"))
    if not files:
        raise ProfileError(f"no token frequencies in {folder} (workers write them every {INTERVAL:.0f} s)")
    try:
        return np.sum([_read_counts(file, arm) for file in files], axis=0)
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ProfileError(f"the token frequencies in {folder} cannot be read: {error}") from None


def _read_counts(file: Path, arm: str) -> npt.NDArray[np.int64]:
    """Return what a worker counted for an arm, int64 [vocab]."""
    with np.load(file) as content:
        return content[arm]


def write_profile(path: Path, counts: npt.NDArray[np.int64]) -> None:
    """Write counts, int64 [vocab], as a profile.

    Raises:
        ProfileError: the file cannot be written.
    """
    ids = np.flatnonzero(counts)
    content = {"vocab": len(counts), "counts": {str(i): int(counts[i]) for i in ids}}
    try:
        path.write_text(json.dumps(content))
    except OSError as error:
        raise ProfileError(f"the profile {path} cannot be written: {error.strerror}") from None


def read_profile(path: Path, vocab: int) -> npt.NDArray[np.int64]:
    """Return the counts of a profile, int64 [vocab].

    Raises:
        ProfileError: it cannot be read, is no profile, or of another vocabulary.
    """
    try:
        content = json.loads(path.read_text())
        stored = int(content["vocab"])
        if stored != vocab:
            raise ProfileError(f"the profile {path} is of a vocabulary of {stored} ids, the model has {vocab}")
        counts = np.zeros(vocab, np.int64)
        for token, count in content["counts"].items():
            if int(token) < 0 or int(count) < 0:
                raise ValueError(f"id {token} has the count {count}")
            counts[int(token)] = int(count)
    except OSError as error:
        raise ProfileError(f"the profile {path} cannot be read: {error.strerror}") from None
    except ProfileError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise ProfileError(f"{path} is no profile of token frequencies: {error!r}") from None
    return counts
