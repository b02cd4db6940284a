"""How a draw in Triton is cut into programs, and what it costs: launches and bytes, counted without a GPU."""

from dataclasses import dataclass

from vllm_gumbel.kernels.slots import Filters

#: Bytes that a part leaves for the last program of its row: two float64, one float32, two int32.
PART_BYTES = 28


@dataclass(frozen=True)
class Tiles:
    """How many ids a program holds at a time; powers of two.

    Attributes:
        part: ids of one program of a launch over parts of rows; at least 2.
        group: ids that share one maximum, for a top-k; divides `part`.
        row: ids that a program holds which walks over a whole row.
        candidates: longest list of candidates of a top-k.
        part_warps, row_warps: warps of such programs.
    """

    part: int
    group: int
    row: int
    candidates: int
    part_warps: int = 4
    row_warps: int = 16

    def parts(self, vocab: int) -> int:
        """Return how many programs share a row."""
        return max(1, -(-vocab // self.part))

    def groups(self, vocab: int) -> int:
        """Return how many group maxima a row has."""
        return self.parts(vocab) * self.part // self.group


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel's name, and the bytes it moves if every row uses every filter that is named."""

    kernel: str
    bytes: int


def power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is at least `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


def tiles_for(vocab: int, device_type: str) -> Tiles:
    """Return the tiles for rows of `vocab` ids; they depend on nothing else, so that any batch has the same programs.

    A part of 4096 ids is 32 a thread: enough loads in flight, and two or three scores to every search. Triton's
    interpreter, which runs on a "cpu", takes milliseconds a program and gets as few as Triton allows.
    """
    whole = power_of_2(max(2, vocab))
    if device_type == "cpu":
        whole = min(whole, 65536)
        return Tiles(part=whole, group=min(128, whole), row=whole, candidates=1024)
    return Tiles(part=min(whole, 4096), group=min(128, whole), row=min(whole, 8192), candidates=4096)


def plan(
    rows: int, vocab: int, logit_bytes: int, filters: Filters, *, processed: bool = False, device_type: str = "cuda"
) -> list[Launch]:
    """Return the launches of a draw, in order.

    Args:
        rows, vocab: shape of the logits.
        logit_bytes: bytes of one logit.
        filters: filters that every row is taken to use. Rows with a top-p whose first winner lies outside the nucleus,
            a few percent, are not counted, nor are lists of a top-k that overflow.
        processed: whether the kept set is wanted; its cuts are counted as one pass, though they take more.
        device_type: as torch names it.
    """
    tiles = tiles_for(vocab, device_type)
    logits = rows * vocab * logit_bytes
    parts = rows * tiles.parts(vocab) * PART_BYTES
    maxima = rows * tiles.groups(vocab) * 4 if filters.top_k else 0
    results = rows * 9
    launches = [Launch("rows", logits + 2 * parts + maxima + results)]
    if filters.top_p:
        launches.append(Launch("nucleus", rows * 4 if filters.top_k else logits + results))
    if filters:
        launches.append(Launch("settle", logits + maxima + results if filters.top_k else rows * 4))
    if processed:
        launches += [Launch("cuts", logits + rows * 8), Launch("kept", logits + rows * vocab * 4)]
    return launches
