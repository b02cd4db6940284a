"""The two servers that the tests of parity ask, with everything switched on that one server can have."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity.models import RANK, write_adapter
from tests.parity.pair import Pair
from tests.serving import serving

#: Prompts in chunks of 64 tokens, and a cache of 1,088 tokens, so that some requests at once are preempted.
TIGHT = ("--max-num-batched-tokens", "64", "--max-num-seqs", "16", "--block-size", "32")
CACHE = ("--num-gpu-blocks-override", "34", "--enable-prefix-caching")

#: What starts and ends a thought of the default model, which knows none.
THINKING = json.dumps({"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"})


@pytest.fixture(scope="package")
def pair(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The default model served twice."""
    folder = tmp_path_factory.mktemp("parity")
    adapter = write_adapter(folder / "adapter", model_path)
    lora = ("--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", f"tuned={adapter}")
    flags = (*TIGHT, *CACHE, *lora, "--max-logprobs", "-1", "--reasoning-config", THINKING)
    with (
        serving(model_path, folder / "stock.log", *flags) as stock,
        serving(model_path, folder / "ours.log", *flags, "--sampler", "gumbel") as ours,
    ):
        yield Pair(stock, ours)
