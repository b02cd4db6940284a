"""The noise can be written down again from its specification, and vLLM's own can be replayed in NumPy."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from tests.interpreted import run as run_interpreted
from vllm_gumbel import cli
from vllm_gumbel.evaluate import noise_stock
from vllm_gumbel.evaluate.noise_command import VECTORS, Address, table, words
from vllm_gumbel.kernels import noise_reference

SPECIFICATION = Path(noise_stock.__file__).with_name("NOISE.md").read_text()


def mix64(z):
    """`NOISE.md`, section 1, in Python's integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def specified(seed, position, token, stream=0, salt=0):
    """Return h16, r48 and G by `NOISE.md` alone: none of the package's code, and no NumPy."""
    golden = 0x9E3779B97F4A7C15
    h = 0
    for word in (seed, position, stream, salt):
        h = mix64(((h ^ (word % 2**64)) + golden) % 2**64)
    a, b = mix64((h + golden) % 2**64), mix64((h + 2 * golden) % 2**64)
    k0, k1, k2 = a % 2**32, a >> 32, b
    x = ((token >> 1) * 0x9E3779B9 + k0) % 2**32
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15) ^ k1) * 0x846CA68B % 2**32
    x ^= x >> 15
    h16 = x >> 16 if token % 2 else x % 2**16
    r48 = mix64((k2 + (token + 1) * golden) % 2**64) >> 16
    w = h16 * 2**48 + r48
    e = -math.log1p(-(w + 0.5) / 2**64) if w < 2**63 else -math.log((2**64 - 1 - w + 0.5) / 2**64)
    return h16, r48, -math.log(e)


def test_noise_is_what_the_specification_says():
    """1,000 random addresses and the vectors: words equal, G to 1e-13, some thousand times its last bit's worth."""
    rng = np.random.default_rng(1)
    random = [
        Address(
            int(rng.integers(-(2**63), 2**63)),
            int(rng.integers(0, 2**40) >> rng.integers(0, 40)),
            int(rng.integers(0, 262_144)),
            int(rng.integers(0, 4)),
            int(rng.integers(0, 2**64, dtype=np.uint64)),
        )
        for _ in range(1000)
    ]
    for address in (*random, *VECTORS):
        h16, r48, g = specified(*address)
        found = words(address)
        assert (found["h16"], found["r48"]) == (h16, r48), address
        assert found["G"] == pytest.approx(g, rel=1e-13, abs=1e-13), address
        ids = np.array([address.token])
        assert noise_reference.gumbel(address.seed, address.position, ids, address.stream, address.salt) == found["G"]


def test_specification_prints_the_vectors_of_the_command(capsys):
    assert cli.main(["noise", "--vectors"]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed in SPECIFICATION
    assert printed.splitlines() == table([words(address) for address in VECTORS])


def test_worked_example_of_the_specification_is_right():
    values = dict(re.findall(r"^\| (\w+) \| `(0x[0-9a-f]+)` \|$", SPECIFICATION, re.MULTILINE))
    assert set(values) >= {"h", "a", "b", "k0", "k1", "k2", "x", "h16", "z", "r48"}
    golden, h = 0x9E3779B97F4A7C15, 0
    for word in (42, 7, 0, 0):
        h = mix64(((h ^ word) + golden) % 2**64)
    a, b = mix64((h + golden) % 2**64), mix64((h + 2 * golden) % 2**64)
    h16, r48, g = specified(42, 7, 1000)
    expected = {"h": h, "a": a, "b": b, "k0": a % 2**32, "k1": a >> 32, "k2": b, "h16": h16, "r48": r48}
    assert {name: int(values[name], 16) for name in expected} == expected
    assert int(values["z"], 16) >> 16 == r48
    assert int(values["x"], 16) % 2**16 == h16
    assert f"G = {g:.12f}" in SPECIFICATION


def test_command_prints_one_token(capsys):
    assert cli.main(["noise", "--seed", "42", "--position", "7", "--token", "1000"]) == 0
    h16, r48, g = specified(42, 7, 1000)
    printed = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert (int(printed["h16"], 16), int(printed["r48"], 16)) == (h16, r48)
    assert float(printed["G"]) == pytest.approx(g, rel=1e-13)


def test_command_prints_json_of_another_stream_and_salt(capsys):
    arguments = ["--seed", "-3", "--position", "0x10", "--token", "5", "--stream", "tail", "--salt", "9", "--json"]
    assert cli.main(["noise", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["noise_version"] == 1
    assert (found["h16"], found["r48"]) == specified(-3, 16, 5, 2, 9)[:2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seed", "1", "--position", "2"],
        ["--seed", str(2**64), "--position", "2", "--token", "1"],
        ["--seed", "1", "--position", "-1", "--token", "1"],
        ["--seed", "one", "--position", "1", "--token", "1"],
        ["--seed", "1", "--position", "1", "--token", "1", "--stream", "other"],
    ],
)
def test_wrong_addresses_are_refused(arguments, capsys):
    try:
        code = cli.main(["noise", *arguments])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert "--" in capsys.readouterr().err


STOCK_CHECK = """
import numpy as np, torch, triton, triton.language as tl
from vllm_gumbel.evaluate import noise_stock
from vllm_gumbel.kernels.noise_stock_triton import stock_scores

@triton.jit
def write(seeds, positions, out, TILE: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0)
    ids = tl.arange(0, TILE)
    scores = stock_scores(tl.load(seeds + row), tl.load(positions + row), ids, tl.zeros((TILE,), tl.float32), WIDE)
    tl.store(out + row * TILE + ids, scores.to(tl.float64))

rng, tile, rows = np.random.default_rng(3), 4096, 25
seeds = torch.from_numpy(rng.integers(-2**63, 2**63, rows))
positions = torch.from_numpy(rng.integers(0, 2**40, rows) >> rng.integers(0, 40, rows))
for wide in (False, True):
    out = torch.empty(rows, tile, dtype=torch.float64)
    write[(rows,)](seeds, positions, out, TILE=tile, WIDE=wide)
    for row in range(rows):
        mine = noise_stock.gumbel(int(seeds[row]), int(positions[row]), np.arange(tile), wide=wide)
        assert mine.dtype == (np.float64 if wide else np.float32)
        different = int((mine.astype(np.float64) != out[row].numpy()).sum())
        largest = float(np.abs(mine - out[row].numpy()).max())
        assert largest < (1e-12 if wide else 2e-6), (wide, row, different, largest)
print("equal")
"""


def test_stock_noise_is_that_of_the_triton_function(tmp_path):
    """2 precisions, 25 rows of 4,096 ids; the two may differ in the last bits of a logarithm only."""
    script = tmp_path / "stock.py"
    script.write_text(STOCK_CHECK)
    assert "equal" in run_interpreted(script)


def test_stock_hash_is_murmur3():
    """Known answers of MurmurHash3_x86_32 of 16 bytes with seed 0, from its published definition in plain integers."""

    def published(data, h=0):
        for start in range(0, len(data), 4):
            k = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 % 2**32
            k = ((k << 15) | (k >> 17)) % 2**32 * 0x1B873593 % 2**32
            h ^= k
            h = ((h << 13) | (h >> 19)) % 2**32
            h = (h * 5 + 0xE6546B64) % 2**32
        h ^= len(data)
        h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
        h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
        return h ^ (h >> 16)

    rng = np.random.default_rng(4)
    for _ in range(200):
        seed, position, token = int(rng.integers(0, 2**63)), int(rng.integers(0, 2**20)), int(rng.integers(0, 2**18))
        data = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + token.to_bytes(4, "little")
        assert int(noise_stock.hash32(seed, position, np.array([token]))[0]) == published(data)
