#!/usr/bin/env python
"""Put the noise function through dieharder's whole battery and an avalanche test.

    scripts/noise_battery.py avalanche                        about a minute
    scripts/noise_battery.py run --kind upper16 --axis token --out results/   one of eight streams, an hour or more
    scripts/noise_battery.py stream --kind word64 --axis seed | dieharder -g 200 -d 0

Streams are raw little-endian words: `upper16` are the 16 bits that every token gets, `word64` the whole value. An axis
says which input runs fastest: along `token` 131,072 ids of one (seed, position), then the next position; along
`position` and `seed` consecutive values with the rest fixed for 2^20 of them; `interleaved` advances all three at once.
dieharder reads them from standard input (`-g 200`) with `-Y 1`, which repeats WEAK results with more data until they
are PASSED or FAILED. Results stand in the docstring of `vllm_gumbel/kernels/noise_reference.py`.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from numba import njit

from vllm_gumbel.kernels import noise_reference as reference

KINDS = ("upper16", "word64")
AXES = ("token", "position", "seed", "interleaved")
BLOCK = 1 << 17
GOLDEN, MIX_A, MIX_B = (np.uint64(c) for c in (reference.GOLDEN, reference.MIX_A, reference.MIX_B))
PAIR, M1, M2 = (np.uint32(c) for c in (reference.PAIR, reference.M1, reference.M2))


@njit(inline="always")
def mix64(z):
    z = (z ^ (z >> np.uint64(30))) * MIX_A
    z = (z ^ (z >> np.uint64(27))) * MIX_B
    return z ^ (z >> np.uint64(31))


@njit
def fill(out, index, axis, lower):
    """Write the 64-bit noise words number `index`, `index` + 1, ... of an axis; without `lower`, r48 stays 0."""
    for i in range(out.size):
        n = np.uint64(index) + np.uint64(i)
        if axis == 0:
            seed, position, token = np.uint64(1), n >> np.uint64(17), n & np.uint64(BLOCK - 1)
        elif axis == 1:
            seed, position, token = n >> np.uint64(40), n & np.uint64(0xFFFFF), (n >> np.uint64(20)) & np.uint64(0xFFFFF)
        elif axis == 2:
            seed, position, token = n & np.uint64(0xFFFFF), n >> np.uint64(40), (n >> np.uint64(20)) & np.uint64(0xFFFFF)
        else:
            seed, position, token = n, n * np.uint64(3) + np.uint64(7), (n * np.uint64(5)) & np.uint64(BLOCK - 1)
        h = mix64((np.uint64(0) ^ seed) + GOLDEN)
        h = mix64((h ^ position) + GOLDEN)
        h = mix64(h + GOLDEN)
        h = mix64(h + GOLDEN)
        a = mix64(h + GOLDEN)
        k0, k1 = np.uint32(a & np.uint64(0xFFFFFFFF)), np.uint32(a >> np.uint64(32))
        x = np.uint32(np.uint32(token >> np.uint64(1)) * PAIR + k0)
        x = np.uint32((x ^ (x >> np.uint32(16))) * M1)
        x = np.uint32((x ^ (x >> np.uint32(15)) ^ k1) * M2)
        x = x ^ (x >> np.uint32(15))
        h16 = np.uint64(x >> np.uint32(16)) if token & np.uint64(1) else np.uint64(x & np.uint32(0xFFFF))
        out[i] = h16 << np.uint64(48)
        if lower:
            b = mix64(h + GOLDEN + GOLDEN)
            out[i] |= mix64(b + (token + np.uint64(1)) * GOLDEN) >> np.uint64(16)


def inputs(n: int, axis: str) -> tuple[int, int, int]:
    """Return (seed, position, token) of word number `n` of an axis, in plain Python."""
    if axis == "token":
        return 1, n >> 17, n & (BLOCK - 1)
    if axis == "position":
        return n >> 40, n & 0xFFFFF, (n >> 20) & 0xFFFFF
    if axis == "seed":
        return n & 0xFFFFF, n >> 40, (n >> 20) & 0xFFFFF
    return n, 3 * n + 7, 5 * n & (BLOCK - 1)


def check_against_reference() -> None:
    """Stop unless the compiled streams equal the reference on 4,000 words of each axis."""
    out = np.empty(500, np.uint64)
    for axis in AXES:
        for start in range(0, 8 << 20, 1 << 20):
            fill(out, start + 77, AXES.index(axis), True)
            for i in range(0, out.size, 7):
                seed, position, token = inputs(start + 77 + i, axis)
                expected = reference.noise_words(seed, position, np.array([token]))[0]
                if out[i] != expected:
                    raise SystemExit(f"stream {axis}: word {start + 77 + i} is {out[i]}, the reference says {expected}")


def stream(kind: str, axis: str) -> None:
    """Write the words of an axis to standard output until the reader closes it."""
    out = np.empty(1 << 18, np.uint64)
    index = 0
    try:
        while True:
            fill(out, index, AXES.index(axis), kind == "word64")
            words = (out >> np.uint64(48)).astype("<u2") if kind == "upper16" else out.astype("<u8")
            sys.stdout.buffer.write(words.data)
            index += out.size
    except BrokenPipeError:
        sys.stderr.close()


def run(kind: str, axis: str, out: Path) -> int:
    """Run the battery on one stream, print dieharder's lines as they come, and store them as JSON."""
    if not shutil.which("dieharder"):
        raise SystemExit("dieharder is not installed; on Debian: apt-get install dieharder")
    began = time.time()
    words = subprocess.Popen([sys.executable, __file__, "stream", "--kind", kind, "--axis", axis], stdout=subprocess.PIPE)
    command = ["dieharder", "-a", "-g", "200", "-Y", "1"]
    battery = subprocess.Popen(command, stdin=words.stdout, stdout=subprocess.PIPE, text=True)
    results = []
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{kind}-{axis}.json"
    for line in battery.stdout or ():
        if match := re.match(r"\s*(\S+)\|\s*(\d+)\|\s*(\d+)\|\s*(\d+)\|\s*([\d.]+)\|\s*(PASSED|WEAK|FAILED)", line):
            test, ntup, tsamples, psamples, p, verdict = match.groups()
            results.append([test, int(ntup), int(tsamples), int(psamples), float(p), verdict])
            print(f"{kind} {axis} {line.strip()}", flush=True)
            document = {"kind": kind, "axis": axis, "seconds": round(time.time() - began), "results": results}
            path.write_text(json.dumps(document, indent=1))
    words.kill()
    words.wait()
    last = {tuple(r[:2]): r[5] for r in results}  # a repeated test's last verdict stands
    failed = [key for key, verdict in last.items() if verdict == "FAILED"]
    weak = sum(r[5] == "WEAK" for r in results)
    print(f"{kind} {axis}: {len(results)} results, {weak} WEAK on the way, {len(failed)} FAILED {failed}")
    return 1 if failed else 0


def avalanche(samples: int) -> int:
    """Flip every input bit; each of the 64 output bits must change in half of the samples.

    With 10^6 samples a share has standard deviation 0.0005; the largest of 200 x 64 deviations stays below 6 of them
    except with probability 3e-5.
    """
    generator = np.random.Generator(np.random.PCG64(20))
    token = generator.integers(0, 2**18, samples)
    fields = {name: generator.integers(0, 2**64, samples, dtype=np.uint64) for name in ("seed", "position", "salt")}
    fields["position"] >>= np.uint64(43)

    def words(seed, position, salt, token):
        k0, k1, k2 = reference.row_keys(seed, position, 0, salt)
        upper = reference.upper_words(k0, k1, token).astype(np.uint64)
        return (upper << np.uint64(48)) | reference.lower_words(k2, token)

    base = words(**fields, token=token)
    worst = 0.0
    for name, bits in (("seed", 64), ("position", 21), ("salt", 64), ("token", 18)):
        largest = 0.0
        for bit in range(bits):
            flipped = dict(fields, token=token)
            flipped[name] = flipped[name] ^ flipped[name].dtype.type(1 << bit)
            change = base ^ words(**flipped)
            for b in range(64):
                share = np.count_nonzero(change & np.uint64(1 << b)) / samples
                largest = max(largest, abs(share - 0.5))
        print(f"avalanche {name}: {bits} x 64 bit pairs, {samples} samples, largest deviation from 1/2: {largest:.5f}")
        worst = max(worst, largest)
    limit = 6 * 0.5 / samples**0.5
    print(f"avalanche: worst {worst:.5f}, limit {limit:.5f}: {'passed' if worst < limit else 'FAILED'}")
    return 0 if worst < limit else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("stream", "run"):
        command = commands.add_parser(name)
        command.add_argument("--kind", choices=KINDS, required=True)
        command.add_argument("--axis", choices=AXES, required=True)
        if name == "run":
            command.add_argument("--out", type=Path, default=Path("noise_battery_results"))
    commands.add_parser("avalanche").add_argument("--samples", type=int, default=1_000_000)
    arguments = parser.parse_args()
    check_against_reference()
    if arguments.command == "stream":
        return stream(arguments.kind, arguments.axis) or 0
    if arguments.command == "run":
        return run(arguments.kind, arguments.axis, arguments.out)
    return avalanche(arguments.samples)


if __name__ == "__main__":
    sys.exit(main())
