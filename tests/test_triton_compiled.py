"""The Triton kernels compile for GPUs, which needs none, and address rows with 64 bits.

Triton's interpreter forgives what a compiler does not: a variable whose type differs between the branches of an `if`,
an argument of 1 that becomes a constant. One process compiles every kernel for one GPU of either vendor.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {"nvidia": ("cuda", 90, 32), "amd": ("hip", "gfx942", 64)}

COMPILE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from vllm_gumbel.kernels import kept_triton, nucleus_triton, rows_triton, settle_triton
from vllm_gumbel.kernels.plan_triton import power_of_2, tiles_for

TYPES = dict(stride="i32", vocab="i32", limit="i32", groups="i32", stream="i32", processed_stride="i32", slots="*i32",
    positions="*i64", temperature="*fp32", top_k="*i32", top_p="*fp32", min_p="*fp32", seed="*i64", salt="*i64",
    tokens="*i64", tokens_out="*i64", flags="*u8", flags_out="*u8", counters="*i32", part_scores="*fp64",
    part_largest="*fp32", part_tokens="*i32", part_masses="*fp32", group_largest="*fp32", lists="*i32",
    row_scores="*fp64", row_largest="*fp32", row_states="*i32", cuts="*i64", processed="*fp32")

def compiled(kernel, logits, warps, ones=(), **constants):
    constants |= dict.fromkeys(ones, 1)
    types = {**TYPES, "logits": logits}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = [name for name in ("logits", "stride", "vocab", "limit") if name in signature and name not in constants]
    source = ASTSource(kernel, signature, constants,
                       {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned})
    target = GPUTarget(*json.loads(sys.argv[1]))
    return compile(source, target=target, options={"num_warps": warps}).asm["ttir"]

def variants(vocab, logits, ones=()):
    tiles = tiles_for(vocab, "cuda")
    parts = dict(PARTS=tiles.parts(vocab), TILE=tiles.part, warps=tiles.part_warps, logits=logits)
    rows = dict(TILE=tiles.row, warps=tiles.row_warps, logits=logits)
    counted = dict(PARTS_TILE=power_of_2(tiles.parts(vocab)))
    settle = dict(LIST=tiles.candidates, GROUPS_TILE=power_of_2(tiles.groups(vocab)))
    draw = dict(GROUP=tiles.group, HAS_PADDING=True, **counted)
    has = lambda kernel: [name for name in ones if name in kernel.arg_names]
    for noise, filtered, top_k in ((0, False, False), (0, True, True), (1, True, False), (2, False, False)):
        kernel = rows_triton.rows_kernel
        yield compiled(kernel, **parts, **draw, FILTERED=filtered, HAS_TOP_K=top_k, NOISE=noise, ones=has(kernel))
    for noise, top_k in ((0, True), (1, False), (2, True)):
        kernel = settle_triton.settle_kernel
        yield compiled(kernel, **rows, **settle, HAS_TOP_K=top_k, NOISE=noise, ones=has(kernel))
    for kernel, constants in ((nucleus_triton.nucleus_kernel, parts | counted), (kept_triton.cuts_kernel, rows),
                              (kept_triton.kept_kernel, parts)):
        yield compiled(kernel, **constants, ones=has(kernel))

print(json.dumps([*variants(151_936, "*bf16"), *variants(1, "*fp32", ones=("stride", "vocab", "limit", "groups"))]))
"""


@pytest.mark.parametrize("vendor", TARGETS)
def test_kernels_compile_and_address_rows_with_64_bits(vendor, tmp_path):
    """20 kernels: V = 151,936 in bfloat16, and V = 1, whose arguments of 1 become constants (vllm#46560: offsets)."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": str(ROOT)}
    # A file, since Triton reads the source of what it compiles.
    script = tmp_path / "compile_kernels.py"
    script.write_text(COMPILE)
    command = [sys.executable, script, json.dumps(TARGETS[vendor])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    sources = json.loads(done.stdout)
    by_row = re.compile("tt.addptr %(logits|lists|processed|group_largest)")
    assert len(sources) == 20
    offsets = [line.split(":")[-1] for source in sources for line in source.splitlines() if by_row.search(line)]
    assert len(offsets) >= 20
    assert all("i64" in types for types in offsets), offsets
