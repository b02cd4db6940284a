"""What every backend of the draw agrees on: shapes, dtypes, constants, streams, and the one input check.

Nothing here computes a token. `sample_reference.py` defines the right answer; every other backend takes the same
arguments, checked by `check`, and returns the same `Draw`.
"""

from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np
import numpy.typing as npt

#: Version of the noise function. The table of known answers in `tests/` never changes within a version.
NOISE_VERSION = 1

#: Temperatures below this are greedy, as in vLLM (`v1/sample/sampler.py`, `_SAMPLING_EPS`).
GREEDY_TEMPERATURE = 1e-5

#: `Draw.tokens` holds this where a row has no candidate at all.
NO_TOKEN = -1


class Stream(IntEnum):
    """Independent families of noise for one (seed, position).

    Two uses share a stream only where sharing cannot bias what is sent.
    """

    TARGET = 0  #: the token that is sent; also drafts that are verified by exact match, where sharing makes them match
    INVERSE_CDF = 1  #: the one uniform of an inverse-CDF draw, which must not predict the Gumbel race after it
    TAIL = 2  #: normal noise added to logits, which must not favour the winners of the race
    DRAFT = 3  #: drafts verified by rejection: sharing the target's noise there biases the result


class Flag(IntFlag):
    """What was noticed about a row while it was drawn (bits of `Draw.flags`)."""

    NONFINITE = 1  #: a NaN or +inf among the logits
    NO_CANDIDATE = 2  #: every logit is NaN or -inf; the token is `NO_TOKEN`
    PADDED = 4  #: an id past the tokenizer's size would have won


#: What a flag says of the logits themselves, whoever draws.
OF_LOGITS = np.uint8(Flag.NONFINITE | Flag.NO_CANDIDATE)

#: Logits of a batch: float32, float16, or uint16 that holds the bits of bfloat16, which NumPy lacks.
Logits = npt.NDArray[np.float32] | npt.NDArray[np.float16] | npt.NDArray[np.uint16]


@dataclass(frozen=True)
class RowParams:
    """Parameters of a batch of draws, one entry a row.

    Attributes:
        temperature: float32 [rows]; below `GREEDY_TEMPERATURE` the row is greedy and ignores everything else.
        top_k: int32 [rows]; <= 0 or >= vocabulary means no limit.
        top_p: float32 [rows] in (0, 1]; 1 means no limit.
        min_p: float32 [rows] in [0, 1]; 0 means no limit.
        seed: uint64 [rows]; a request's seed modulo 2^64.
        position: int64 [rows], >= 0; index in its sequence of the last token fed to the model before the draw.
        salt: uint64 [rows]; mixed into the key, 0 by default.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]
    salt: npt.NDArray[np.uint64]

    @classmethod
    def uniform(
        cls,
        rows: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        position: int = 0,
        salt: int = 0,
    ) -> "RowParams":
        """Return parameters that give every one of `rows` rows the same values."""
        return cls(
            temperature=np.full(rows, temperature, np.float32),
            top_k=np.full(rows, top_k, np.int32),
            top_p=np.full(rows, top_p, np.float32),
            min_p=np.full(rows, min_p, np.float32),
            seed=np.full(rows, seed % 2**64, np.uint64),
            position=np.full(rows, position, np.int64),
            salt=np.full(rows, salt % 2**64, np.uint64),
        )

    def take(self, rows: npt.NDArray[np.int64]) -> "RowParams":
        """Return the parameters of some rows, in the order of their indices."""
        return RowParams(**{name: values[rows] for name, values in vars(self).items()})


@dataclass(frozen=True)
class Draw:
    """Result of a batch of draws.

    Attributes:
        tokens: int64 [rows]; the drawn ids, `NO_TOKEN` where a row has no candidate.
        flags: uint8 [rows]; bits of `Flag`.
    """

    tokens: npt.NDArray[np.int64]
    flags: npt.NDArray[np.uint8]


_LOGITS = (np.dtype(np.float32), np.dtype(np.uint16), np.dtype(np.float16))
_DTYPES = {
    "temperature": np.dtype(np.float32),
    "top_k": np.dtype(np.int32),
    "top_p": np.dtype(np.float32),
    "min_p": np.dtype(np.float32),
    "seed": np.dtype(np.uint64),
    "position": np.dtype(np.int64),
    "salt": np.dtype(np.uint64),
}


def check(logits: Logits, params: RowParams, usable_vocab: int | None) -> int:
    """Check the arguments of a draw and return the number of ids that may be drawn.

    Args:
        logits: float32, float16 or uint16 (bits of bfloat16) [rows, vocab], any strides, offsets of 64 bits.
        params: one entry per row of `logits`.
        usable_vocab: number of ids the tokenizer knows; None means all of them.

    Raises:
        TypeError: a dtype differs from the contract.
        ValueError: a shape differs, or `usable_vocab` is below 1.
    """
    check_logits(logits)
    rows, vocab = shape = logits.shape
    expected = shape[:1]
    for name, dtype in _DTYPES.items():
        values = getattr(params, name)
        if values.dtype is not dtype and values.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, got {values.dtype}")
        if values.shape != expected:
            raise ValueError(f"{name} must have shape ({rows},), got {values.shape}")
    if usable_vocab is None:
        return vocab
    if usable_vocab < 1:
        raise ValueError(f"usable_vocab must be at least 1, got {usable_vocab}")
    return min(usable_vocab, vocab)


def check_logits(logits: Logits) -> None:
    """Raise `TypeError` for logits of another dtype than the contract's, `ValueError` if they are no matrix."""
    if logits.ndim != 2:
        raise ValueError(f"logits must be [rows, vocab], got shape {logits.shape}")
    if logits.dtype not in _LOGITS:
        raise TypeError(f"logits must be uint16 (bits of bfloat16), float16 or float32, got {logits.dtype}")


def widen(logits: Logits) -> npt.NDArray[np.float32]:
    """Return logits as float32 of the same shape; exact, and the same array if they are float32 already."""
    if logits.dtype == np.uint16:
        return (logits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return logits.astype(np.float32, copy=False)


def is_sound(row: npt.NDArray[np.float32]) -> bool:
    """Return whether a row of logits can be drawn from: nothing is NaN or +inf, something is finite."""
    return bool(row.max() < np.inf and row.max() > -np.inf)  # a NaN makes both false
