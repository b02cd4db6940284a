"""What every test shares: an environment in which nothing is asked of the network, and the default model."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from vllm import LLM

    from tests.serving import Server

# Before any test module imports vLLM or transformers, which read these once. A GiB of cache each: up to four servers
# and engines live at a time, beside the tests without any, and one that finds less free than its cache does not start.
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_CPU_KVCACHE_SPACE="1")
# Tests read logs, and scripts that they import ask for less; threads that wait must not take another engine's time.
os.environ.update(VLLM_LOGGING_LEVEL="INFO", GOMP_SPINCOUNT="0")

# `scripts/test -k fuzz_kernels --hypothesis-profile long`: more examples of what leaves their number open.
settings.register_profile("long", max_examples=5_000)

#: Modules that start servers or engines. Two of them at once would only wait for each other, while most others need one
#: CPU: so `scripts/test` runs these in one process, and all others in a second one at the same time.
ENGINES = (
    "evaluate_compare_engine",
    "evaluate_verify_engine",
    "faults",
    "faults_server",
    "fuzz_server",
    "keys_engine",
    "keys_metrics",
    "keys_server",
    "metrics",
    "observability",
    "parity_commands",
    "parity_draws",
    "parity_endpoints",
    "parity_engines",
    "parity_logits",
    "parity_logprobs",
    "parity_stops",
    "parity_structured",
    "rollout_server",
    "security_server",
    "server",
    "speculative",
    "startup",
    "stock",
    "tensor_parallel",
    "topologies",
)


#: Of those, modules that start so many that a run of all tests leaves them to `scripts/test -m slow`.
SLOW = ("parity_commands", "parity_engines")


@pytest.hookimpl(tryfirst=True)  # before markers select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests with servers and engines, and those with many."""
    for item in items:
        if item.path.stem.removeprefix("test_") in ENGINES:
            item.add_marker(pytest.mark.engines)
        if item.path.stem.removeprefix("test_") in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The folder of the default model, in the user's own cache, so that it is converted once and not by every run."""
    from vllm_gumbel.default_model import prepare

    return prepare()


@pytest.fixture(scope="session")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Server"]:
    """The default model served with `--sampler gumbel` and everything that makes reproducibility hard."""
    from tests.serving import serving

    flags = ("--sampler", "gumbel", "--max-num-batched-tokens", "64", "--max-num-seqs", "48", "--async-scheduling")
    processors = ("--logits-processors", "tests.processors:SpoilLogits", "tests.processors:HalveTempered")
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(model_path, log, *flags, *processors, "--enable-prefix-caching") as running:
        yield running


@pytest.fixture(scope="session")
def engine(model_path: Path) -> Iterator["LLM"]:
    """The default model in an `LLM` with the sampler `gumbel`, whole prompts, and a cache small enough to preempt."""
    from vllm import LLM

    llm = LLM(
        str(model_path),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        block_size=32,
        num_gpu_blocks_override=34,
        enable_prefix_caching=False,
        async_scheduling=False,
        disable_log_stats=False,
        additional_config={"sampler": "gumbel"},
    )
    yield llm
    llm.llm_engine.engine_core.shutdown()
