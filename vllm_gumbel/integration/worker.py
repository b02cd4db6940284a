"""What a worker learns from vLLM's configuration: its replica, the tokenizer's size, where it counts."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

import vllm_gumbel
from vllm_gumbel.integration import compat
from vllm_gumbel.kernels.contract import NOISE_VERSION
from vllm_gumbel.kernels.dispatch import Backend, SlotBackend
from vllm_gumbel.metrics import exporter, glitch
from vllm_gumbel.metrics.frequencies import ProfileError, read_profile
from vllm_gumbel.metrics.recorder import Recorder
from vllm_gumbel.settings import SamplerSettings, SettingsError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.gumbel")


def announce(backend: Backend | SlotBackend, noise: str) -> None:
    """Say in the log what draws here; `noise` is the version of the noise."""
    logger.info(
        "vllm-gumbel %s draws with backend %r (%s), noise version %s",
        vllm_gumbel.__version__,
        backend.name,
        backend.reason,
        noise,
    )


def replica(config: "VllmConfig") -> int:
    """Return the index of this worker's data-parallel replica."""
    return int(getattr(config.parallel_config, "data_parallel_index", config.parallel_config.data_parallel_rank))


def logits_dtypes(config: "VllmConfig") -> list[np.dtype]:
    """Return the dtypes, as the kernels see them, in which logits will come: the model's, and float32 once changed."""
    model = {torch.bfloat16: np.uint16, torch.float16: np.float16}.get(config.model_config.dtype, np.float32)
    return [np.dtype(dtype) for dtype in dict.fromkeys((model, np.float32))]


def usable_vocab(config: "VllmConfig") -> int | None:
    """Return how many ids the tokenizer knows; None, said in the log, if there is no tokenizer to ask."""
    from vllm.tokenizers import cached_tokenizer_from_config

    try:
        tokenizer = cached_tokenizer_from_config(config.model_config)
        return None if tokenizer is None else int(tokenizer.max_token_id) + 1
    except Exception as error:
        logger.warning("vllm-gumbel: the tokenizer's size is unknown, so padded ids are not excluded: %r", error)
        return None


def end_of_sequence(config: "VllmConfig") -> int | None:
    """Return the model's end-of-sequence id, None if it has none."""
    ids = getattr(config.model_config.hf_text_config, "eos_token_id", None)
    return next(iter(ids), None) if isinstance(ids, list) else ids


def require_profile(config: "VllmConfig", settings: SamplerSettings) -> None:
    """Raise `SettingsError` if the setting `token_profile` names no profile of the model's vocabulary."""
    if settings.token_profile is None:
        return
    try:
        read_profile(Path(settings.token_profile), config.model_config.get_vocab_size())
    except ProfileError as error:
        raise SettingsError(f"sampler config: token_profile: {error}") from None


def recorder(
    config: "VllmConfig", settings: SamplerSettings, backend: str, noise: str = str(NOISE_VERSION)
) -> Recorder | None:
    """Return what counts for this worker, None if another one does.

    Of several tensor-parallel ranks that draw the same tokens that is the first; where each draws a share of the batch
    (`--enable-batch-sharded-sampling`), all count.

    Args:
        config: vLLM's configuration.
        settings: server-wide settings.
        backend: label.
        noise: label `noise_version`.
    """
    from vllm.distributed.parallel_state import get_tp_group

    if not settings.metrics:
        return None
    try:
        sharded = getattr(config.parallel_config, "enable_batch_sharded_sampling", None)
        if get_tp_group().rank_in_group != 0 and not sharded:
            return None
        folder = exporter.shared_folder()
        made = Recorder(
            folder,
            model_name=_served_name(config),
            engine=replica(config),
            settings=settings,
            vocab=config.model_config.get_vocab_size(),
            slots=config.scheduler_config.max_num_seqs,
            glitches=_glitches(config) if settings.watch_glitches else None,
            summary_seconds=compat.log_interval(),
            build={
                "version": vllm_gumbel.__version__,
                "noise_version": noise,
                "backend": backend,
                "runner": "v2" if config.use_v2_model_runner else "v1",
                "vllm_version": compat.vllm_version(),
            },
        )
        if settings.metrics_address is not None:
            _serve(made, folder, settings.metrics_address, replica(config))
        return made
    except Exception as error:
        logger.warning("vllm-gumbel: nothing will be counted, tokens are drawn all the same: %s", error)
        return None


def _serve(made: Recorder, folder: Path, address: str, replica: int) -> None:
    """Answer scrapes in this worker; if that cannot be, it is a fault, and the server's own page still has all."""
    try:
        exporter.serve(folder, address, replica)
    except (OSError, OverflowError) as error:
        made.fault("recorder", error)


def _glitches(config: "VllmConfig") -> np.ndarray | None:
    """Return, bool [vocab], which ids are glitch tokens; None, said in the log, if that cannot be found out."""
    try:
        return glitch.find(_model_folder(config)).mask(config.model_config.get_vocab_size())
    except Exception as error:  # a model of another kind, a cache that cannot be written: serving does not need it
        logger.warning("vllm-gumbel: glitch tokens are not counted: %s", error)
        return None


def _model_folder(config: "VllmConfig") -> Path:
    """Return the folder of the model's files: itself, or where its name on the hub has been downloaded to."""
    from huggingface_hub import try_to_load_from_cache

    name = config.model_config.model
    if Path(name).is_dir():
        return Path(name)
    there = try_to_load_from_cache(name, "config.json", revision=config.model_config.revision)
    return Path(there).parent if isinstance(there, str) else Path(name)


def _served_name(config: "VllmConfig") -> str:
    """Return the model's name as vLLM's own metrics show it."""
    name = config.model_config.served_model_name
    return name[0] if isinstance(name, list) else str(name)
