"""Samplers with a fault, for tests and studies of what notices it: `--sampler tests.broken:TooHot`.

Each draws otherwise than it should, while what watches the draws goes by what the request asked for.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from vllm_gumbel.integration.v1 import GumbelSampler
from vllm_gumbel.integration.watch import Watch
from vllm_gumbel.kernels.contract import widen
from vllm_gumbel.metrics.step import Watched

TABLE_SIZE = 2**20


class TooHot(GumbelSampler):
    """Draws at a temperature 12% too high."""

    def draw_rows(self, logits, params, **others):
        """See the parent."""
        return super().draw_rows(logits, replace(params, temperature=params.temperature * np.float32(1.12)), **others)


class WithoutTail(GumbelSampler):
    """Never draws the least likely tenth of the mass."""

    def draw_rows(self, logits, params, **others):
        """See the parent."""
        return super().draw_rows(logits, replace(params, top_p=np.minimum(params.top_p, np.float32(0.9))), **others)


class NarrowTopP(GumbelSampler):
    """Takes every top_p for one that is 0.01 less."""

    shift = np.float32(-0.01)

    def draw_rows(self, logits, params, **others):
        """See the parent."""
        top_p = np.where(params.top_p < 1, params.top_p + self.shift, params.top_p)
        return super().draw_rows(logits, replace(params, top_p=top_p), **others)


class WideTopP(NarrowTopP):
    """Takes every top_p for one that is 0.01 more."""

    shift = np.float32(0.01)


class SharedNoise(GumbelSampler):
    """Gives every row of a step the noise of the first."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.watch.__class__ = _SharedWatch

    def draw_rows(self, logits, params, **others):
        """See the parent."""
        return super().draw_rows(logits, _with_one_noise(params), **others)


class _SharedWatch(Watch):
    """Believes in the noise that was used, as it would if the fault were in the noise itself."""

    def _seen(self, tokens, logits, params, *others, **more):
        return super()._seen(tokens, logits, _with_one_noise(params), *others, **more)


def _with_one_noise(params):
    first = {
        name: np.full_like(getattr(params, name), getattr(params, name)[0]) for name in ("seed", "position", "salt")
    }
    return replace(params, **first)


class SmallTable(GumbelSampler):
    """Takes its noise from a table of 2^20 values, read from a place that seed and position choose."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.watch.__class__ = _TableWatch

    def draw_rows(self, logits, params, *, processed, **others):
        """See the parent."""
        drawn = super().draw_rows(logits, params, processed=True, **others)
        for row, x in enumerate(drawn.processed.numpy()):
            if params.temperature[row] >= 1e-5:
                drawn.draw.tokens[row] = int(np.argmax(x + _table_noise(params, row, len(x))))
        return drawn


class _TableWatch(Watch):
    """Believes in the noise that was used."""

    def _seen(self, tokens, logits, params, seeded, where, index, **more):
        watched = super()._seen(tokens, logits, params, seeded, where, index, **more)
        drawn = zip(index, tokens[index], strict=True)
        noise = [_table_noise(params, row, logits.shape[1])[token] for row, token in drawn]
        score = noise - watched.statistics.surprisal
        return Watched(watched.index, replace(watched.statistics, score=score), watched.tested)


_TABLE = -np.log(-np.log(np.random.default_rng(0).random(TABLE_SIZE)))


def _table_noise(params, row, vocab):
    mixed = (int(params.seed[row]) + 0x9E3779B97F4A7C15 * (int(params.position[row]) + 1)) % 2**64
    mixed = (mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93 % 2**64
    start = (mixed >> 40) % TABLE_SIZE
    return np.take(_TABLE, np.arange(start, start + vocab), mode="wrap")


class HotAndUnmasked(TooHot):
    """Draws at a temperature 12% too high, and takes the ids that a mask has excluded for the best ones."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        right = self.backend.draw

        def draw(logits, *arguments, **others):
            wide = widen(logits)
            return right(np.where(np.isneginf(wide), wide.max(axis=1, keepdims=True), wide), *arguments, **others)

        self.backend = replace(self.backend, draw=draw)


class FailsWhileTold(GumbelSampler):
    """Has a kernel that raises while there is a file whose path is the environment variable `KERNEL_FAULT`.

    The file holds how many draws are still to fail.
    """

    def __init__(self, **arguments):
        super().__init__(**arguments)
        right, told = self.backend.draw, Path(os.environ["KERNEL_FAULT"])

        def draw(*arguments, **others):
            if told.exists():
                left = int(told.read_text()) - 1
                if left > 0:
                    told.write_text(str(left))
                else:
                    told.unlink()
                raise RuntimeError("a fault on demand")
            return right(*arguments, **others)

        self.backend = replace(self.backend, draw=draw)
