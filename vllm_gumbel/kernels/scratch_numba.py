"""The scratch memory of one thread, cut into arrays; allocated once, by `sample_numba`."""

from typing import Any, NamedTuple

from vllm_gumbel.kernels.blocks_numba import BLOCK
from vllm_gumbel.kernels.jit_numba import F32, I32, I64, U16, U32, jit

_FIXED = 1024  # bytes at the front for the marks and the pairs of one block


class Scratch(NamedTuple):
    """Arrays for one row at a time.

    Attributes:
        marks: uint8 [256]; which ids of a block may win.
        pairs: uint32 [192]; noise words of a block.
        largest: float32 [blocks]; block maxima of the ids that may be drawn, then those of the padding.
        words: uint16 [blocks]; smallest h16 of each block.
        block_marks: uint8 [blocks]; which blocks may hold a winner.
        promises: int64 [blocks]; which blocks to race first.
        ids: int32 [vocab]; candidates, ascending.
        xs: float32 [vocab]; their tempered values.
        values: float32 [vocab]; values to select from, reordered.
        clean: uint8 [4 vocab]; a copy of the row without NaN.
    """

    marks: Any
    pairs: Any
    largest: Any
    words: Any
    block_marks: Any
    promises: Any
    ids: Any
    xs: Any
    values: Any
    clean: Any


def bytes_of_workspace(vocab: int) -> int:
    """Return how much scratch memory one thread needs for rows of `vocab` ids: 16 bytes an id."""
    return _FIXED + 15 * int(_most_blocks(vocab)) + 16 * int(_rounded(vocab))


@jit(inline=True)
def _most_blocks(vocab: Any) -> Any:
    """Return the number of blocks of a row cut in two at any id, rounded up to 64."""
    return ((vocab + BLOCK - 1) // BLOCK + 1 + 63) & ~63


@jit(inline=True)
def _rounded(vocab: Any) -> Any:
    """Return `vocab` rounded up to 64."""
    return (vocab + 63) & ~63


@jit
def scratch_of(workspace: Any, vocab: Any) -> Any:
    """Return a workspace, uint8 [bytes_of_workspace(vocab)] or more, as `Scratch`."""
    blocks, size = _most_blocks(vocab), _rounded(vocab)
    at = _FIXED + 4 * blocks
    words = at + 2 * blocks
    marks = words + blocks
    lists = marks + 8 * blocks
    return Scratch(
        workspace[:BLOCK],
        workspace[BLOCK:_FIXED].view(U32),
        workspace[_FIXED:at].view(F32),
        workspace[at:words].view(U16),
        workspace[words:marks],
        workspace[marks:lists].view(I64),
        workspace[lists : lists + 4 * size].view(I32),
        workspace[lists + 4 * size : lists + 8 * size].view(F32),
        workspace[lists + 8 * size : lists + 12 * size].view(F32),
        workspace[lists + 12 * size : lists + 16 * size],
    )
