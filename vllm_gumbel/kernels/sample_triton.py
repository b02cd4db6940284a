"""The draw in Triton: the tokens, flags and kept sets of `sample_reference`, for GPUs.

Parameters lie on the device by request slot, and each row names its slot, as in vLLM's model runner V2. Nothing is
copied to the host and nothing waits for the device: what the host has to know, which filters any row uses, it is told.
Grids depend on shapes alone, so a draw can be captured in a graph, after one draw outside (it allocates counters).

Launches, rows cut into parts of `Tiles.part` ids:

    rows      always                 reads every logit once, writes and reads 28 bytes a part; writes the largest logit
                                     of every 128 for a top-k
    nucleus   any row has a top-p    reads once more the rows that have one and no top-k
    settle    any filter             reads once more the rows with a top-k, and about twice more the few percent whose
                                     first winner a top-p or min_p refused; others return at once
    cuts      `processed` is given   reads the rows some 20 to 40 times
    kept      `processed` is given   reads every logit once and writes 4 bytes

`plan_triton.plan` states them as numbers. Tokens equal the reference's unless the scores of two finalists, or a mass
and its share, agree to about 1e-12. Only Triton's own operations are used, none of one vendor's; what Triton does not
promise to round (float32 exponentials, reciprocals) decides nothing.
"""

from typing import Any

import torch

from vllm_gumbel.kernels.contract import Stream
from vllm_gumbel.kernels.kept_triton import cuts_kernel, kept_kernel
from vllm_gumbel.kernels.nucleus_triton import nucleus_kernel
from vllm_gumbel.kernels.plan_triton import power_of_2, tiles_for
from vllm_gumbel.kernels.rows_triton import rows_kernel
from vllm_gumbel.kernels.settle_triton import settle_kernel
from vllm_gumbel.kernels.slots import Filters, Noise, SlotDraw, SlotParams

__all__ = ["Filters", "Noise", "SlotDraw", "SlotParams", "draw", "warm_up"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PARAM_DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
    "salt": torch.int64,
}
_counters: dict[torch.device, list[torch.Tensor]] = {}


def draw(
    logits: torch.Tensor,
    params: SlotParams,
    slots: torch.Tensor,
    positions: torch.Tensor,
    filters: Filters,
    *,
    usable_vocab: int | None = None,
    stream: Stream = Stream.TARGET,
    noise: Noise = Noise.OWN,
    processed: torch.Tensor | None = None,
) -> SlotDraw:
    """Draw one token per row. Draws on one device must not overlap in time: they share counters.

    Args:
        logits: float32, bfloat16 or float16 [rows, vocab], any row stride; not changed. Copied if its columns do not
            lie side by side.
        params: temperature (finite), filters, seed and salt, one entry a slot.
        slots: int32 [rows]; slot of each row. A negative one marks a row without a request: its token is `NO_TOKEN`,
            its flags are 0, its row of `processed` stays as it is.
        positions: int64 [rows], as `contract.RowParams.position`.
        filters: which filters any row uses.
        usable_vocab: ids from here on are unknown to the tokenizer and never drawn; None means that all are known.
        stream: family of noise; `TARGET` alone with stock's noise, whose other uses differ by release.
        noise: whose noise decides.
        processed: float32 [rows, vocab] to receive x after the filters, -inf where not kept; None if not wanted. May be
            `logits` itself if that is float32, but no other view of its memory.

    Returns:
        The tokens and what was noticed about each row.

    Raises:
        TypeError: a dtype differs from the above.
        ValueError: a shape differs, `usable_vocab` is below 1, or the stream has no stock noise.
        RuntimeError: the first draw of so many rows happens while a graph is captured.
    """
    _check(logits, params, slots, positions, usable_vocab, processed)
    if noise != Noise.OWN and stream != Stream.TARGET:
        raise ValueError(f"stock's noise is known for the target's draws only, not for {stream!r}")
    rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    flags = torch.empty(rows, dtype=torch.uint8, device=device)
    if not rows:
        return SlotDraw(tokens, flags)
    limit = vocab if usable_vocab is None else min(usable_vocab, vocab)
    tiles = tiles_for(vocab, device.type)
    parts, groups = tiles.parts(vocab), tiles.groups(vocab)
    filtered = bool(filters)

    def scratch(dtype: torch.dtype, *shape: int, needed: bool = True) -> torch.Tensor:
        return torch.empty(shape if needed else 0, dtype=dtype, device=device)

    logits, slots, positions = _side_by_side(logits), slots.contiguous(), positions.contiguous()
    counters = _zeroed_counters(rows, device)
    group_largest = scratch(torch.float32, rows, groups, needed=filters.top_k)
    row_results = (
        scratch(torch.float64, 2, rows, needed=filtered),
        scratch(torch.float32, rows, needed=filtered),
        scratch(torch.int32, rows, needed=filtered),
    )
    row = (logits, logits.stride(0))
    by_slot = (params.temperature, params.top_k, params.top_p, params.min_p)
    keys = (params.seed, params.salt, int(stream))
    of_parts: dict[str, Any] = {"PARTS": parts, "TILE": tiles.part, "num_warps": tiles.part_warps}
    of_rows: dict[str, Any] = {"TILE": tiles.row, "num_warps": tiles.row_warps}
    rows_kernel[(rows * parts,)](
        *row, vocab, limit, slots, positions, *by_slot, *keys, tokens, flags, counters,
        scratch(torch.float64, 2, rows, parts), scratch(torch.float32, rows, parts),
        scratch(torch.int32, 2, rows, parts), group_largest, *row_results,
        PARTS_TILE=power_of_2(parts), GROUP=tiles.group, HAS_PADDING=limit < vocab, FILTERED=filtered,
        HAS_TOP_K=filters.top_k, NOISE=int(noise), **of_parts,
    )  # fmt: skip
    if filters.top_p:
        nucleus_kernel[(rows * parts,)](
            *row, limit, slots, params.temperature, params.top_p, params.min_p, tokens, flags, counters,
            scratch(torch.float32, 2, rows, parts), *row_results, PARTS_TILE=power_of_2(parts), **of_parts,
        )  # fmt: skip
    if filtered:
        settle_kernel[(rows,)](
            *row, vocab, limit, slots, positions, *by_slot, *keys, tokens, flags, group_largest, groups,
            scratch(torch.int32, rows, tiles.candidates, needed=filters.top_k), *row_results,
            GROUPS_TILE=power_of_2(groups), LIST=tiles.candidates, HAS_TOP_K=filters.top_k, NOISE=int(noise), **of_rows,
        )  # fmt: skip
    if processed is not None:
        out = _side_by_side(processed)
        cuts = scratch(torch.int64, rows)
        cuts_kernel[(rows,)](*row, vocab, limit, slots, *by_slot, cuts, **of_rows)
        kept_kernel[(rows * parts,)](
            *row, vocab, limit, slots, params.temperature, cuts, out, out.stride(0), **of_parts
        )  # fmt: skip
        if out is not processed:
            processed.copy_(out)
    return SlotDraw(tokens, flags)


def warm_up(
    vocab: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    usable_vocab: int | None = None,
    noise: Noise = Noise.OWN,
    rows: int = 1,
) -> None:
    """Compile every kernel that draws of such logits can need, and make room for `rows` rows.

    Args:
        vocab, dtype, device: of the logits.
        usable_vocab, noise: as for `draw`.
        rows: most rows of a draw, for the counters that a graph must find.
    """
    _zeroed_counters(rows, device)
    logits = torch.zeros(1, vocab, dtype=dtype, device=device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    of_slot = {name: torch.ones(1, dtype=kind, device=device) for name, kind in _PARAM_DTYPES.items()}
    for filters in (Filters(), Filters(top_p=True), Filters(top_k=True, top_p=True)):
        draw(
            logits,
            SlotParams(**of_slot),
            slots,
            slots.to(torch.int64),
            filters,
            usable_vocab=usable_vocab,
            noise=noise,
            processed=torch.empty(1, vocab, device=device) if filters.top_k else None,
        )


def _side_by_side(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix whose columns lie side by side in memory: itself, or a copy."""
    return matrix if matrix.shape[1] <= 1 or matrix.stride(1) == 1 else matrix.contiguous()


def _check(
    logits: torch.Tensor,
    params: SlotParams,
    slots: torch.Tensor,
    positions: torch.Tensor,
    usable_vocab: int | None,
    processed: torch.Tensor | None,
) -> None:
    """Raise what `draw` says it raises; looks at shapes and dtypes only."""
    if logits.ndim != 2:
        raise ValueError(f"logits must be [rows, vocab], got shape {tuple(logits.shape)}")
    if logits.dtype not in _DTYPES:
        raise TypeError(f"logits must be float32, bfloat16 or float16, got {logits.dtype}")
    rows = logits.shape[:1]
    expected = [(slots, "slots", torch.int32, rows), (positions, "positions", torch.int64, rows)]
    slot_count = params.temperature.shape
    expected += [(getattr(params, name), name, dtype, slot_count) for name, dtype in _PARAM_DTYPES.items()]
    if processed is not None:
        expected.append((processed, "processed", torch.float32, logits.shape))
    for tensor, name, dtype, shape in expected:
        if tensor.dtype is not dtype:
            raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
        if tensor.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
        if name in _PARAM_DTYPES and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    if usable_vocab is not None and usable_vocab < 1:
        raise ValueError(f"usable_vocab must be at least 1, got {usable_vocab}")


def _zeroed_counters(rows: int, device: torch.device) -> torch.Tensor:
    """Return int32 counters, one a row or more, that are 0: kernels leave them so. Kept, since graphs refer to them."""
    kept = _counters.setdefault(device, [])
    if not kept or len(kept[-1]) < rows:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"draw {rows} rows once before a graph of such a draw is captured")
        kept.append(torch.zeros(max(4096, power_of_2(rows)), dtype=torch.int32, device=device))
    return kept[-1]
