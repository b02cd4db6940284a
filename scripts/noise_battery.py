#!/usr/bin/env python
"""Put the noise function through dieharder's whole battery and an avalanche test.

    scripts/noise_battery.py avalanche                                          about a minute
    scripts/noise_battery.py run --kind upper16 --axis token --out results/     one of eight streams, 15 minutes or more
    scripts/noise_battery.py summary --out results/                             verdicts of all streams

Streams are raw little-endian 32-bit words: of `upper16`, the 16 bits that every token gets, two a word; of `word64`,
the whole value, two words each. An axis says which input runs fastest: along `token` 131,072 ids of one (seed,
position), then the next position; along `position` and `seed` consecutive values with the rest fixed for 2^20 of them;
`interleaved` advances all three at once.

The tests are those of `dieharder -a`, each on words of its own, read from standard input (`-g 200`) with `-Y 1`, which
repeats WEAK results with more data until they are PASSED or FAILED. One thing is done differently, to the same effect:
the lagged sum test at lag n uses every (n + 1)-th word, so it is fed just those, at lag 0, in place of a stream of
which it throws most away. Results stand in the docstring of `vllm_gumbel/kernels/noise_reference.py`.
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

#: 32-bit words from one test's stretch of a stream to the next one's: more than any test reads.
WORDS_PER_TEST = 1 << 36

LAGGED_SUM = 203

#: The tests of `dieharder -a`: number and, where several are run or a default is not meant, the parameter n.
TESTS = [
    *((test, None) for test in (*range(18), 100, 101, 102)),
    *((200, n) for n in range(1, 13)),
    *((201, n) for n in range(2, 6)),
    *((202, n) for n in range(2, 6)),
    *((LAGGED_SUM, n) for n in range(33)),
    *((test, None) for test in (204, 205, 206, 207)),
    (208, 0),  # runs its second variant too
    (209, None),
]
GOLDEN, MIX_A, MIX_B = (np.uint64(c) for c in (reference.GOLDEN, reference.MIX_A, reference.MIX_B))
PAIR, M1, M2 = (np.uint32(c) for c in (reference.PAIR, reference.M1, reference.M2))


@njit(inline="always")
def mix64(z):
    z = (z ^ (z >> np.uint64(30))) * MIX_A
    z = (z ^ (z >> np.uint64(27))) * MIX_B
    return z ^ (z >> np.uint64(31))


@njit(inline="always")
def noise_word(n, axis, lower):
    """Return the 64-bit noise word number `n` of an axis; without `lower`, r48 stays 0."""
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
    if not lower:
        return h16 << np.uint64(48)
    b = mix64(h + GOLDEN + GOLDEN)
    return (h16 << np.uint64(48)) | (mix64(b + (token + np.uint64(1)) * GOLDEN) >> np.uint64(16))


@njit(cache=True)
def fill(out, first, stride, axis, whole):
    """Write the 32-bit words number first, first + stride, ... of the stream of an axis and kind."""
    for i in range(out.size):
        j = np.uint64(first) + np.uint64(i) * np.uint64(stride)
        if whole:
            out[i] = np.uint32(noise_word(j >> np.uint64(1), axis, True) >> ((j & np.uint64(1)) * np.uint64(32)))
        else:
            low = noise_word(j * np.uint64(2), axis, False) >> np.uint64(48)
            high = noise_word(j * np.uint64(2) + np.uint64(1), axis, False) >> np.uint64(48)
            out[i] = np.uint32(low | (high << np.uint64(16)))


def inputs(n: int, axis: str) -> tuple[int, int, int]:
    """Return (seed, position, token) of the 64-bit word number `n` of an axis, in plain Python."""
    if axis == "token":
        return 1, n >> 17, n & (BLOCK - 1)
    if axis == "position":
        return n >> 40, n & 0xFFFFF, (n >> 20) & 0xFFFFF
    if axis == "seed":
        return n & 0xFFFFF, n >> 40, (n >> 20) & 0xFFFFF
    return n % 2**64, (3 * n + 7) % 2**64, 5 * n & (BLOCK - 1)


def expected_word(j: int, axis: str, kind: str) -> int:
    """Return the 32-bit word number `j` of a stream by the reference."""

    def word(n: int) -> int:
        seed, position, token = inputs(n, axis)
        return int(reference.noise_words(seed, position, np.array([token]))[0])

    if kind == "word64":
        return word(j >> 1) >> 32 * (j & 1) & 0xFFFFFFFF
    return word(2 * j) >> 48 | word(2 * j + 1) >> 48 << 16


def check_against_reference() -> None:
    """Stop unless the compiled streams equal the reference on 200 words of each kind and axis, early and late."""
    out = np.empty(20, np.uint32)
    for kind in KINDS:
        for axis in AXES:
            for test in range(10):
                first, stride = test * WORDS_PER_TEST + 77, 1 + 3 * test
                fill(out, first, stride, AXES.index(axis), kind == "word64")
                expected = [expected_word(first + i * stride, axis, kind) for i in range(out.size)]
                if out.tolist() != expected:
                    raise SystemExit(f"stream {kind} {axis} from word {first} differs from the reference")


def stream(kind: str, axis: str, first: int, stride: int) -> int:
    """Write the words of a stream to standard output until the reader closes it."""
    out = np.empty(1 << 18, np.uint32)
    try:
        while True:
            fill(out, first, stride, AXES.index(axis), kind == "word64")
            sys.stdout.buffer.write(out.astype("<u4", copy=False).data)
            first += stride * out.size
    except BrokenPipeError:
        sys.stderr.close()
    return 0


def run(kind: str, axis: str, out: Path, first_test: int) -> int:
    """Run the battery on one stream, print dieharder's lines as they come, and store them as JSON."""
    if not shutil.which("dieharder"):
        raise SystemExit("dieharder is not installed; on Debian: apt-get install dieharder")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{kind}-{axis}.json"
    document = json.loads(path.read_text()) if first_test else {"kind": kind, "axis": axis, "seconds": 0, "results": []}
    for number, (test, ntuple) in enumerate(TESTS):
        if number < first_test:
            continue
        began = time.time()
        lag = ntuple if test == LAGGED_SUM else 0
        where = ["--first", str((number + 1) * WORDS_PER_TEST), "--stride", str(lag + 1)]
        words = subprocess.Popen(
            [sys.executable, __file__, "stream", "--kind", kind, "--axis", axis, *where], stdout=subprocess.PIPE
        )
        command = ["dieharder", "-g", "200", "-Y", "1", "-d", str(test)]
        command += ["-n", "0"] if test == LAGGED_SUM else [] if ntuple is None else ["-n", str(ntuple)]
        battery = subprocess.run(command, stdin=words.stdout, capture_output=True, text=True, check=False)
        words.kill()
        words.wait()
        rows = re.findall(r"^\s*(\S+)\|\s*(\d+)\|\s*(\d+)\|\s*(\d+)\|\s*([\d.]+)\|\s*(\w+)", battery.stdout, re.M)
        if not rows:
            raise SystemExit(f"dieharder -d {test} gave no result:\n{battery.stdout}{battery.stderr}")
        for name, printed_ntuple, samples, times, p, verdict in rows:
            shown = lag if test == LAGGED_SUM else int(printed_ntuple)
            document["results"].append([name, shown, int(samples), int(times), float(p), verdict])
            print(f"{kind} {axis} {name} {shown} {samples} x {times} p={p} {verdict}", flush=True)
        document["seconds"] += round(time.time() - began)
        document["complete"] = number == len(TESTS) - 1
        path.write_text(json.dumps(document, indent=1))
    return summary(out, [path])


def summary(out: Path, paths: list[Path] | None = None) -> int:
    """Print the verdicts of each stream."""
    bad = 0
    for path in paths or sorted(out.glob("*.json")):
        document = json.loads(path.read_text())
        results = document["results"]
        most = {}  # of a test that was repeated, the results with the most data stand
        for name, ntuple, _, times, _, _ in results:
            most[name, ntuple] = max(times, most.get((name, ntuple), 0))
        final = [result for result in results if result[3] == most[result[0], result[1]]]
        repeated = len({(r[0], r[1]) for r in results if r[3] < most[r[0], r[1]]})
        failed = [result[:2] for result in final if result[5] == "FAILED"]
        left = sum(result[5] == "WEAK" for result in final)
        bad += len(failed)
        whole = "whole battery" if document.get("complete") else "part of the battery"
        print(
            f"{document['kind']} {document['axis']}: {whole}, {len(final)} results, FAILED {len(failed)} {failed}, "
            f"WEAK {left}; repeated with more data {repeated}; {document['seconds']} s"
        )
    return 1 if bad else 0


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
    for name in ("stream", "run", "summary"):
        command = commands.add_parser(name)
        if name != "summary":
            command.add_argument("--kind", choices=KINDS, required=True)
            command.add_argument("--axis", choices=AXES, required=True)
        if name == "stream":
            command.add_argument("--first", type=int, default=0, help="number of the first 32-bit word")
            command.add_argument("--stride", type=int, default=1, help="every how-many-th word")
        else:
            command.add_argument("--out", type=Path, default=Path("noise_battery_results"))
        if name == "run":
            command.add_argument("--first-test", type=int, default=0, help="go on with a run from this test on")
    commands.add_parser("avalanche").add_argument("--samples", type=int, default=1_000_000)
    arguments = parser.parse_args()
    if arguments.command == "summary":
        return summary(arguments.out)
    if arguments.command == "stream":
        return stream(arguments.kind, arguments.axis, arguments.first, arguments.stride)
    check_against_reference()
    if arguments.command == "run":
        return run(arguments.kind, arguments.axis, arguments.out, arguments.first_test)
    return avalanche(arguments.samples)


if __name__ == "__main__":
    sys.exit(main())
