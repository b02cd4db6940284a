"""Rows for the tests of the draw: how to make them, and how to draw one."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_gumbel.kernels import sample_reference
from vllm_gumbel.kernels.contract import Flag, RowParams
from vllm_gumbel.rollout.state import Rollout

NAN, INFINITY = float("nan"), float("inf")


class Outcome(NamedTuple):
    """What one row gave: its token, its flags, the ids that the filters left."""

    token: int
    flags: Flag
    kept: list[int]


def draw_row(logits: npt.ArrayLike, *, usable_vocab: int | None = None, **params: float) -> Outcome:
    """Draw one row by the reference; parameters are those of `RowParams.uniform`."""
    row = np.asarray(logits, np.float32)[None]
    processed = np.empty_like(row)
    drawn = sample_reference.draw(row, RowParams.uniform(1, **params), usable_vocab=usable_vocab, processed=processed)
    return Outcome(int(drawn.tokens[0]), Flag(int(drawn.flags[0])), np.flatnonzero(processed[0] > -np.inf).tolist())


def draw_many(logits: npt.ArrayLike, *, seeds: Sequence[int] | range, **params: float) -> npt.NDArray[np.int64]:
    """Draw the same row once for each seed, in one batch."""
    row = np.asarray(logits, np.float32)
    batch = RowParams.uniform(len(seeds), **params)
    batch.seed[:] = np.asarray(seeds)
    return sample_reference.draw(np.broadcast_to(row, (len(seeds), len(row))), batch).tokens


def bfloat16(values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Return finite values rounded to bfloat16 (to nearest, ties to even), as float32: many of them are tied."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))
    return (bits & np.uint64(0xFFFF0000)).astype(np.uint32).view(np.float32)


def take(params: RowParams, rows: npt.ArrayLike) -> RowParams:
    """Return the parameters of some rows, in that order."""
    return RowParams(**{name: values[rows] for name, values in vars(params).items()})


def random_params(rng: np.random.Generator, rows: int, vocabulary: int) -> RowParams:
    """Return parameters that differ by row: greedy, every filter, none, values at and past their ends."""

    def choose(*options: npt.ArrayLike) -> npt.NDArray:
        return np.choose(rng.integers(len(options), size=rows), [np.broadcast_to(o, rows) for o in options])

    return RowParams(
        temperature=choose(0.0, 1e-5, 0.7, 1.0, rng.uniform(0.05, 3, rows)).astype(np.float32),
        top_k=choose(-1, 0, 1, vocabulary, vocabulary + 1, 2**31 - 1, rng.integers(1, vocabulary + 1, rows)).astype(
            np.int32
        ),
        top_p=choose(1.0, 1.5, 0.0, 1e-30, 1 - 2**-24, rng.uniform(0, 1, rows), rng.uniform(0.8, 1, rows)).astype(
            np.float32
        ),
        min_p=choose(0.0, -1.0, 1.0, 1e-30, rng.uniform(0, 1, rows), rng.uniform(0, 0.1, rows)).astype(np.float32),
        seed=rng.integers(0, 2**64, rows, dtype=np.uint64),
        position=rng.integers(0, 2**40, rows),
        salt=choose(0, rng.integers(0, 2**62, rows)).astype(np.uint64),
    )


def turn(rollout: Rollout, rng: random.Random) -> None:
    """Change a rollout at random, or open or close its breaker."""
    if rollout.breaker.is_open:
        rollout.change({"breaker": "close"})
    elif rng.random() < 0.25:
        rollout.breaker.open("a walk")
    else:
        rollout.change({"fraction": rng.choice([0, 1]), "shadow": rng.choice([0, 1])})
