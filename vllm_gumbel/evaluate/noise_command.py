"""`vllm-gumbel noise`: prints the noise of a token, or the known answers of the specification (`NOISE.md`)."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_gumbel.kernels import noise_reference as noise
from vllm_gumbel.kernels.contract import NOISE_VERSION, Stream

DONE, USAGE = 0, 2


class Address(NamedTuple):
    """What the noise of one token is a function of."""

    seed: int
    position: int
    token: int
    stream: int = Stream.TARGET
    salt: int = 0


#: The addresses of the known answers: small ones, the ends of every word, every stream, and ids of both parities.
VECTORS = (
    Address(0, 0, 0),
    Address(0, 0, 1),
    Address(1, 0, 0),
    Address(0, 1, 0),
    Address(42, 7, 1000),
    Address(42, 7, 1001),
    Address(42, 7, 128_255),
    Address(42, 7, 1000, Stream.INVERSE_CDF),
    Address(42, 7, 1000, Stream.TAIL),
    Address(42, 7, 1000, Stream.DRAFT),
    Address(42, 7, 1000, Stream.TARGET, 1),
    Address(-1, 7, 1000),
    Address(2**64 - 1, 7, 1000),
    Address(2**63, 2**20, 262_143, Stream.TARGET, 2**64 - 1),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the address of a token."""
    parser.description = (
        "Print the noise of a token: h16 and r48, the number v that they make, E = -ln(1 - v) and G = -ln(E). Position "
        "is the index, in its sequence, of the last token before the draw: for the first token of an answer the length "
        "of the prompt less one."
    )
    parser.add_argument("--seed", type=_word)
    parser.add_argument("--position", type=_index)
    parser.add_argument("--token", type=_index)
    parser.add_argument("--salt", type=_word, default=0, help="default 0")
    streams = [stream.name.lower() for stream in Stream]
    parser.add_argument("--stream", choices=streams, default="target", help="what the noise is for; default target")
    parser.add_argument("--vectors", action="store_true", help="print the table of known answers instead")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print one token's noise, or the table."""
    if arguments.vectors:
        rows = [words(address) for address in VECTORS]
        print(
            json.dumps({"noise_version": NOISE_VERSION, "vectors": rows}) if arguments.json else "\n".join(table(rows))
        )
        return DONE
    missing = [name for name in ("seed", "position", "token") if getattr(arguments, name) is None]
    if missing:
        print(f"vllm-gumbel noise: --{missing[0]} is missing, or --vectors", file=sys.stderr)
        return USAGE
    stream = Stream[arguments.stream.upper()]
    found = words(Address(arguments.seed, arguments.position, arguments.token, stream, arguments.salt))
    if arguments.json:
        print(json.dumps({"noise_version": NOISE_VERSION, **found}))
        return DONE
    print(f"h16  {found['h16']:#06x}\nr48  {found['r48']:#014x}\nv    {found['v']!r}")
    print(f"E    {found['E']!r}\nG    {found['G']!r}")
    return DONE


def words(address: Address) -> dict[str, Any]:
    """Return the noise of a token, under the names of the specification."""
    seed, position, token, stream, salt = address
    ids = np.array([token], np.int64)
    word = noise.noise_words(seed, position, ids, stream, salt)
    whole = int(word[0])
    return {
        "seed": seed,
        "position": position,
        "token": token,
        "stream": int(stream),
        "salt": salt,
        "h16": whole >> 48,
        "r48": whole & (2**48 - 1),
        "v": float((word[0].astype(np.float64) + 0.5) * 2.0**-64),
        "E": float(noise.exponential(word)[0]),
        "G": float(noise.gumbel(seed, position, ids, stream, salt)[0]),
    }


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the known answers, as `NOISE.md` has them."""
    lines = ["| seed | position | token | stream | salt | h16 | r48 | G |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        address = [str(row[name]) for name in ("seed", "position", "token", "stream", "salt")]
        lines.append(f"| {' | '.join(address)} | {row['h16']:#06x} | {row['r48']:#014x} | {row['G']:.12f} |")
    return lines


def _word(text: str) -> int:
    """Return an integer of 64 bits, signed or not."""
    if not -(2**63) <= (value := int(text, 0)) < 2**64:
        raise argparse.ArgumentTypeError(f"must be an integer from -2^63 to 2^64 - 1, got {text}")
    return value


def _index(text: str) -> int:
    """Return an integer, at least 0 and below 2^40."""
    if not 0 <= (value := int(text, 0)) < 2**40:
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to 2^40 - 1, got {text}")
    return value
