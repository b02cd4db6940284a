"""Loops at the end of a generated text, and what they cost the tokens that would continue them.

A text ends in a loop of period p with c copies when its last c * p tokens are c times the same piece. The token that
would continue it is the one that stands p places before the next. A text may end in loops of several periods; each
token that continues one counts once, by the smallest period that it continues, so by the most copies.

The published form of an offset against repetition adds 0.1 * position to the noise of the whole row. One number added
to every score changes no argmax: that form does nothing, and `tests/test_keys_kernels.py` shows it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

#: Longest period that is looked for.
LONGEST_PERIOD = 64

#: Fewest copies that make a loop.
FEWEST_COPIES = 3


def continuations(tokens: Sequence[int]) -> dict[int, int]:
    """Return the tokens that would continue a loop at the end of `tokens`, each with the loop's number of copies.

    A negative token, which stands for one that is not known yet, equals nothing.
    """
    found: dict[int, int] = {}
    length = len(tokens)
    for period in range(1, min(LONGEST_PERIOD, length // FEWEST_COPIES) + 1):
        following = tokens[length - period]
        if following in found:
            continue
        repeated = 0
        while repeated < length - period:
            token = tokens[length - 1 - repeated]
            if token < 0 or token != tokens[length - 1 - repeated - period]:
                break
            repeated += 1
        copies = repeated // period + 1
        if copies >= FEWEST_COPIES:
            found[following] = copies
    return found


def discourage(logits: npt.NDArray[np.float32], tokens: Sequence[int], offset: float) -> npt.NDArray[np.float32]:
    """Return `logits`, float32 [vocab], with offset * copies taken off every token that would continue a loop."""
    loops = continuations(tokens)
    if not loops:
        return logits
    changed = logits.copy()
    for token, copies in loops.items():
        changed[token] -= np.float32(offset * copies)
    return changed
