"""`register()`: what the plugin replaces in vLLM, and when.

vLLM calls it in every process (entry point group `vllm.general_plugins`). It only wraps; nothing of ours acts until a
configuration chooses a sampler other than `default`. The ledger, all of it the same in 0.31 to 0.33:

Wrapped always, passing through for `default`; can go when vLLM has a sampler option (RFC vllm#51212):

- `EngineArgs.add_cli_args`: adds the flags, in the group "Sampler".
- `EngineArgs.from_cli_args`: carries what they say into `additional_config`.
- `EngineArgs.create_engine_config`: refuses a bad choice before anything starts.
- `WorkerWrapperBase.init_device`: the last moment before the model runner is built.

In a worker that chose a sampler, in the module of the runner it uses, `vllm.v1.worker.gpu_model_runner` for V1 and
`vllm.v1.worker.gpu.model_runner` for V2:

- `Sampler`, name replaced: the runner builds its sampler by that name. Can go with the above.
- `RejectionSampler`, name replaced if the sampler asks for it: drafts verified by exact match. Can go with the above.
- V1 only: `InputBatch`, name replaced if the sampler asks for it: seed and position per row. Can go when the runner
  hands positions to its sampler, as V2 does.
- `gumbel_seeds`, an attribute added to `WorkerWrapperBase`, so that `collective_rpc` finds it by name: what requests
  with `gumbel_return_info` draw with. Can go when a sampler's output can carry something to the client.
- `gumbel_rollout`, likewise: reads and changes the rollout's state (`control.py`). Can go when vLLM has a way to tell
  its workers something.

In a process that takes requests, once a sampler was chosen:

- `InputProcessor._build_logits_processors_params_validator`, wrapped: bad parameters become a 400. Can go when samplers
  can validate parameters.
- `SamplingParams.from_optional`, wrapped: the same for streams, whose status is sent before vLLM checks; a NaN logit
  bias is refused, which vLLM turns into -100; and an integer past 64 bits is refused by the name of its key. Can go
  when vLLM checks before it streams.
- `prometheus_client.REGISTRY`, a collector added: workers' counters on `/metrics`. Can go when vLLM's workers export
  metrics.
"""

import logging
import math
import os
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_gumbel.integration import choice, compat, control, registry, replay
from vllm_gumbel.metrics.exporter import FolderCollector, forget_dead, host_shows_folder, shared_folder
from vllm_gumbel.params import ParamsError
from vllm_gumbel.settings import SamplerSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.gumbel")

#: Names replaced in the modules of vLLM's runners, with what they were.
_stock_names: dict[tuple[ModuleType, str], Any] = {}

#: Folders whose counters this process already shows.
_shown_folders: set[Path] = set()


def register() -> None:
    """Wrap vLLM's configuration and worker start-up; a second call changes nothing.

    A vLLM that lacks one of these is left as it is, with a warning.

    Raises:
        UnsupportedError: it lacks one, and the environment asks for a sampler of ours.
    """
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        wrapped: tuple[tuple[Any, str, Callable[..., Any], Callable[[Any], Any]], ...] = (
            (EngineArgs, "add_cli_args", _add_cli_args, staticmethod),
            (EngineArgs, "from_cli_args", _from_cli_args, classmethod),
            (EngineArgs, "create_engine_config", _create_engine_config, _unchanged),
            (WorkerWrapperBase, "init_device", _init_device, _unchanged),
        )
        for owner, name, _, _ in wrapped:
            if name not in owner.__dict__:
                raise AttributeError(f"{owner.__qualname__} has no {name} of its own")
    except (ImportError, AttributeError) as error:
        said = f"vLLM {compat.vllm_version()} lacks what the plugin builds on, so its own sampler draws: {error}"
        if os.environ.get(choice.SAMPLER_VARIABLE, registry.DEFAULT) != registry.DEFAULT:
            raise compat.UnsupportedError(f"{choice.SAMPLER_VARIABLE} is set, and {said}") from error
        logger.warning("vllm-gumbel: %s", said)
        return
    for each in wrapped:
        _wrap(*each)


def _unchanged(function: Any) -> Any:
    return function


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any], kind: Callable[[Any], Any] = _unchanged) -> None:
    """Replace `owner.name` by `wrapper(original, *arguments)`, once."""
    original = owner.__dict__[name]
    plain = getattr(original, "__func__", original)
    if getattr(plain, "wrapped_by_vllm_gumbel", False):
        return

    @wraps(plain)
    def replacement(*arguments: Any, **keywords: Any) -> Any:
        return wrapper(plain, *arguments, **keywords)

    replacement.wrapped_by_vllm_gumbel = True  # type: ignore[attr-defined]
    setattr(owner, name, kind(replacement))


def _add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    parser = original(parser)
    choice.add_flags(parser)
    return parser


def _from_cli_args(original: Callable[..., Any], cls: type, args: Any) -> Any:
    choice.merge_flags(args)
    return original(cls, args)


def _create_engine_config(original: Callable[..., Any], self: Any, *arguments: Any, **keywords: Any) -> Any:
    chosen = choice.read(self.additional_config)
    if chosen.is_default:
        return original(self, *arguments, **keywords)
    try:
        compat.require_supported_version()
    except compat.UnsupportedError as error:
        if chosen.settings.on_unsupported_vllm == "refuse":
            raise
        logger.warning("vllm-gumbel: vLLM's own sampler draws in place of %r: %s", chosen.name, error)
        config = original(self, *arguments, **keywords)
        choice.carry(choice.Choice(registry.DEFAULT, chosen.settings), config)
        return config
    registry.resolve(chosen.name)
    config = original(self, *arguments, **keywords)
    cls = registry.resolve_for_runner(chosen.name, v2=config.use_v2_model_runner)
    if cls is not None and hasattr(cls, "check_config"):
        cls.check_config(config)
    choice.carry(chosen, config)
    _prepare_frontend(chosen, cls)
    return config


def _prepare_frontend(chosen: choice.Choice, cls: type | None) -> None:
    """Let this process refuse bad parameters and show the workers' counters."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    _wrap(InputProcessor, "_build_logits_processors_params_validator", _build_validator)
    check = partial(_validate, cls, chosen.settings)
    _wrap(SamplingParams, "from_optional", partial(_from_optional, check), staticmethod)
    if chosen.settings.metrics:
        try:
            _show_metrics()
        except OSError as error:
            logger.warning("vllm-gumbel: no metrics, tokens are drawn all the same: %s", error)


def _build_validator(original: Callable[..., Any], self: Any) -> Callable[[Any], None]:
    stock = original(self)
    chosen = choice.read(self.vllm_config.additional_config)
    cls = registry.resolve_for_runner(chosen.name, v2=self.vllm_config.use_v2_model_runner)

    def validate(params: Any) -> None:
        _validate(cls, chosen.settings, params)
        stock(params)

    return validate


def _from_optional(check: Callable[[Any], None], original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Check what the OpenAI endpoints ask for, before they start to answer.

    vLLM's own check comes when the first token is asked for, which for a stream is after the status 200 was sent; and
    it does not see a logit bias that is NaN, since `from_optional` has turned that into -100. Integers past 64 bits
    among the extra arguments it refuses here, without saying which: where that is a key of ours, we say so first.
    """
    from vllm.exceptions import VLLMValidationError

    for token, bias in (keywords.get("logit_bias") or {}).items():
        if not math.isfinite(bias):
            message = f"logit_bias must hold finite numbers, got {bias} for token {token}"
            raise VLLMValidationError(message, parameter="logit_bias")
    try:
        params = original(*arguments, **keywords)
    except VLLMValidationError as error:
        if error.parameter == "extra_args":
            params = original(*arguments, **{**keywords, "extra_args": None})
            params.extra_args = keywords["extra_args"]
            check(params)
        raise
    check(params)
    return params


def _validate(cls: type | None, settings: SamplerSettings, params: Any) -> None:
    """Let a sampler check a request's parameters; what it refuses becomes a 400 with its text."""
    from vllm.exceptions import VLLMValidationError

    check = getattr(cls, "validate_params", None)
    if check is None:
        return
    try:
        check(params, settings)
    except ParamsError as error:
        raise VLLMValidationError(str(error), parameter=error.key) from None
    except ValueError as error:
        raise VLLMValidationError(str(error)) from error


def _show_metrics() -> None:
    """Let `/metrics` show the workers' counters, once per folder."""
    from prometheus_client import REGISTRY

    if host_shows_folder():
        return
    folder = shared_folder()
    if folder not in _shown_folders:
        _shown_folders.add(folder)
        forget_dead(folder)
        REGISTRY.register(FolderCollector(folder))


def _init_device(original: Callable[..., Any], self: Any, *arguments: Any, **keywords: Any) -> Any:
    chosen = choice.read(self.vllm_config.additional_config)
    _choose_in_worker(chosen, self.vllm_config)
    result = original(self, *arguments, **keywords)
    runner = getattr(self.worker, "model_runner", None)
    bind = getattr(getattr(runner, "sampler", None), "bind", None)
    if bind is not None:
        bind(runner)
    if not chosen.is_default:
        self.gumbel_seeds = partial(replay.told, runner)
        self.gumbel_rollout = partial(control.in_worker, runner)
    return result


def _choose_in_worker(chosen: choice.Choice, config: "VllmConfig") -> None:
    """Make the runner's module build the chosen sampler from now on, or vLLM's own again."""
    for (module, name), stock in _stock_names.items():
        setattr(module, name, stock)
    cls = registry.resolve_for_runner(chosen.name, v2=not chosen.is_default and config.use_v2_model_runner)
    if cls is None:
        return
    runner = _runner_module(config)
    _replace(runner, "Sampler", partial(cls.from_vllm_config, config) if hasattr(cls, "from_vllm_config") else cls)
    if hasattr(cls, "verifier"):
        _replace(runner, "RejectionSampler", cls.verifier())
    if hasattr(cls, "input_batch"):
        _replace(runner, "InputBatch", cls.input_batch(config))


def _runner_module(config: "VllmConfig") -> ModuleType:
    """Return the module of the model runner that a worker will build."""
    if config.use_v2_model_runner:
        from vllm.v1.worker.gpu import model_runner

        return model_runner
    from vllm.v1.worker import gpu_model_runner

    return gpu_model_runner


def _replace(module: ModuleType, name: str, replacement: Any) -> None:
    """Replace a name of a runner's module, keeping what it was."""
    _stock_names.setdefault((module, name), getattr(module, name))
    setattr(module, name, replacement)
