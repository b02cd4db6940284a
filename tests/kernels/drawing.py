"""How the checks of the Triton kernels draw a batch and compare it with the reference."""

import numpy as np
import pytest
import torch

from tests.rows import Outcome, take
from vllm_gumbel.kernels import sample_reference, sample_triton
from vllm_gumbel.kernels.contract import Flag, RowParams, Stream
from vllm_gumbel.kernels.plan_triton import Tiles, power_of_2
from vllm_gumbel.kernels.slots import Filters, Noise, SlotDraw, SlotParams, as_array

ALL_FILTERS = Filters(top_k=True, top_p=True, min_p=True)

#: Many parts to a row, many walks over it, and lists of a top-k that overflow.
SMALL_TILES = {"part": 256, "group": 16, "row": 512, "candidates": 32}

#: So many ids are as low as can be in a row of such: no bound tells them apart, so each one's score is computed.
LOWEST = 300


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels cut rows into far smaller tiles than they would in the interpreter."""

    def tiles_for(vocab: int, device_type: str) -> Tiles:
        return Tiles(**{name: min(size, power_of_2(max(2, vocab))) for name, size in SMALL_TILES.items()})

    monkeypatch.setattr(sample_triton, "tiles_for", tiles_for)


def in_slots(params: RowParams, slot_of_row: np.ndarray) -> SlotParams:
    """Return the parameters of rows as those of slots, some slots unused: theirs are NaN or out of range."""
    slots = max(slot_of_row.max(initial=0), 0) + 3

    def spread(values: np.ndarray) -> torch.Tensor:
        values = values.view(np.int64) if values.dtype == np.uint64 else values
        wide = np.full(slots, np.nan if values.dtype.kind == "f" else -7, values.dtype)
        wide[slot_of_row[slot_of_row >= 0]] = values[slot_of_row >= 0]
        return torch.from_numpy(wide)

    names = ("temperature", "top_k", "top_p", "min_p", "seed", "salt")
    return SlotParams(**{name: spread(getattr(params, name)) for name in names})


def draw_in_slots(
    logits: torch.Tensor,
    params: RowParams,
    *,
    filters: Filters = ALL_FILTERS,
    usable_vocab: int | None = None,
    stream: Stream = Stream.TARGET,
    noise: Noise = Noise.OWN,
    processed: torch.Tensor | None = None,
    slot_of_row: np.ndarray | None = None,
) -> SlotDraw:
    """Draw rows whose slots are in no order, or as given, by the Triton kernels."""
    rows = len(logits)
    if slot_of_row is None:
        slot_of_row = np.random.default_rng(rows).permutation(rows + 5)[:rows]
    return sample_triton.draw(
        logits,
        in_slots(params, slot_of_row),
        torch.from_numpy(slot_of_row.astype(np.int32)),
        torch.from_numpy(params.position),
        filters,
        usable_vocab=usable_vocab,
        stream=stream,
        noise=noise,
        processed=processed,
    )


def assert_draws_equal(
    logits: torch.Tensor,
    params: RowParams,
    *,
    filters: Filters = ALL_FILTERS,
    usable_vocab: int | None = None,
    stream: Stream = Stream.TARGET,
    wants_kept: bool = True,
) -> SlotDraw:
    """Assert that tokens, flags and, if wanted, the bits of kept values are the reference's; return the draw."""
    processed = torch.full(logits.shape, torch.nan) if wants_kept else None
    got = draw_in_slots(
        logits, params, filters=filters, usable_vocab=usable_vocab, stream=stream, processed=processed
    )  # fmt: skip
    kept = np.empty(logits.shape, np.float32)
    want = sample_reference.draw(as_array(logits), params, usable_vocab=usable_vocab, stream=stream, processed=kept)
    wrong = (got.tokens.numpy() != want.tokens) | (got.flags.numpy() != want.flags)
    if processed is not None:
        wrong |= (processed.numpy() != kept).any(axis=1)
    assert not wrong.any(), "\n".join(
        f"row {r} of {tuple(logits.shape)}: token {got.tokens[r].item()} for {want.tokens[r]}, flags"
        f" {got.flags[r].item()} for {want.flags[r]}, {vars(take(params, [r]))}"
        for r in np.flatnonzero(wrong)[:5]
    )
    return got


def draw_one(logits: list[float] | np.ndarray, *, usable_vocab: int | None = None, **params: float) -> Outcome:
    """Draw one row; parameters are those of `RowParams.uniform`."""
    row = torch.tensor(np.asarray(logits, np.float32))[None]
    processed = torch.empty_like(row)
    drawn = draw_in_slots(row, RowParams.uniform(1, **params), usable_vocab=usable_vocab, processed=processed)
    ids = torch.nonzero(processed[0] > -torch.inf).flatten().tolist()
    return Outcome(int(drawn.tokens[0]), Flag(int(drawn.flags[0])), ids)


def draw_many(logits: list[float] | np.ndarray, *, seeds: range, **params: float) -> np.ndarray:
    """Draw the same row once for each seed, in one batch."""
    row = torch.tensor(np.asarray(logits, np.float32))
    batch = RowParams.uniform(len(seeds), **params)
    batch.seed[:] = np.asarray(seeds)
    return draw_in_slots(row.expand(len(seeds), -1), batch).tokens.numpy()


def spoil(logits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return logits with masked ids, NaN and infinities, and rows that are empty, NaN, equal or as low as can be."""
    rows, vocab = logits.shape
    logits = np.where(rng.random(logits.shape) < 0.05, np.float32(-np.inf), logits)
    for value in (np.nan, np.inf, -np.inf, 3.4e38):
        for row in rng.integers(rows, size=2):
            logits[row, rng.integers(vocab)] = value
    lowest = np.where(np.arange(vocab) < LOWEST, -3.4e38, -np.inf)
    for row, values in zip(rng.permutation(rows), (-np.inf, np.nan, 1.0, lowest), strict=False):
        logits[row] = values
    return logits
