"""Sampler name -> class: how `--sampler` finds ours, the stock one, or somebody else's.

A sampler comes from one of three places:

- the entry point group `vllm_gumbel.samplers` of any installed package: `name = "module:Class"`;
- `register_sampler(name, cls)`, called from a plugin of the group `vllm.general_plugins`, since the name must be known
  in the API server and in every worker;
- `--sampler module:Class`, without a name.

vLLM has two model runners with a `Sampler` each. The class is a subclass of `vllm.v1.sample.sampler.Sampler`, for
runner V1; its class method `for_runner_v2()`, if it has one, returns the class that draws under runner V2, a subclass
of `vllm.v1.worker.gpu.sample.sampler.Sampler`. A subclass of the latter may be named itself and serves V2 only. A
runner that a sampler has no class for is refused at start-up.

Either class is built as vLLM builds its own, or by its class method `from_vllm_config(vllm_config, **same_arguments)`
if it has one. Optional class methods serve samplers that need more:

- `check_config(vllm_config)`, called before anything starts; an exception ends the start-up with its text;
- `validate_params(sampling_params, settings)`, called at admission with the server's `SamplerSettings`; a ValueError
  becomes a 400 with its text;
- `verifier()` returns what the runner builds in place of vLLM's `RejectionSampler`;
- V1 only: `input_batch(vllm_config)` returns what the runner builds in place of vLLM's `InputBatch`;
- V1 only: `bind(model_runner)`, on the instance, called once the runner is built.
"""

from importlib import import_module
from importlib.metadata import entry_points

#: The classes that samplers derive from, by runner. V2's module is heavy and needs Triton, so it is known by name here.
RUNNER_V1, RUNNER_V2 = "vllm.v1.sample.sampler:Sampler", "vllm.v1.worker.gpu.sample.sampler:Sampler"

DEFAULT = "default"
GROUP = "vllm_gumbel.samplers"

_registered: dict[str, type | str] = {}


class SamplerError(ValueError):
    """A sampler's name is unknown or claimed twice, or what it names is no sampler; the message says which."""


def register_sampler(name: str, cls: type | str) -> None:
    """Give a sampler a name.

    Args:
        name: what `--sampler` takes; letters, digits, `-`, `_` and `.`.
        cls: the class, or "module:Class".

    Raises:
        SamplerError: the name is malformed, reserved, or claimed by another class.
    """
    if not name or not all(c.isalnum() or c in "-_." for c in name):
        raise SamplerError(f"sampler name must consist of letters, digits, '-', '_' and '.', got {name!r}")
    if name == DEFAULT:
        raise SamplerError(f"sampler name {DEFAULT!r} is vLLM's own sampler and cannot be registered")
    if _target(_registered.get(name, cls)) != _target(cls):
        raise SamplerError(f"sampler name {name!r} is claimed by {_target(_registered[name])} and {_target(cls)}")
    _registered[name] = cls


def samplers() -> dict[str, type | str]:
    """Return every named sampler but the default one.

    Raises:
        SamplerError: two packages, or a package and a registration, claim one name for different classes.
    """
    found: dict[str, type | str] = {}
    origin: dict[str, str] = {}
    claims = [(e.name, e.value, f"package {e.dist.name}" if e.dist else "a package") for e in entry_points(group=GROUP)]
    for name, cls, where in [*claims, *((name, cls, "register_sampler") for name, cls in _registered.items())]:
        if name == DEFAULT:
            raise SamplerError(f"sampler name {DEFAULT!r} is vLLM's own sampler, and {where} claims it")
        if name in found and _target(found[name]) != _target(cls):
            raise SamplerError(
                f"sampler name {name!r} is claimed twice: {_target(found[name])} by {origin[name]}, "
                f"{_target(cls)} by {where}; uninstall one of them or name the class as module:Class"
            )
        found[name], origin[name] = cls, where
    return found


def check_name(name: str) -> str:
    """Return `name` if `--sampler` may have that value.

    Raises:
        SamplerError: the name is unknown; the message lists the known ones.
    """
    if name != DEFAULT and ":" not in name and name not in samplers():
        known = ", ".join([DEFAULT, *sorted(samplers())])
        raise SamplerError(f"unknown sampler {name!r}; known: {known}, or module:Class for one of your own")
    return name


def resolve(name: str) -> type | None:
    """Return the class of a sampler, whichever runner it is for; None for vLLM's own.

    Raises:
        SamplerError: the name is unknown, the class cannot be imported, or it is no subclass of a Sampler of vLLM's.
    """
    if check_name(name) == DEFAULT:
        return None
    target = name if ":" in name else samplers()[name]
    cls = _load(target) if isinstance(target, str) else target
    if not (isinstance(cls, type) and (_derives(cls, RUNNER_V1) or _derives(cls, RUNNER_V2))):
        raise SamplerError(
            f"sampler {name!r}: {_target(target)} is not a subclass of {RUNNER_V1.replace(':', '.')}, "
            f"nor of {RUNNER_V2.replace(':', '.')}"
        )
    return cls


def resolve_for_runner(name: str, *, v2: bool) -> type | None:
    """Return the class that draws under one of vLLM's model runners, None for vLLM's own.

    Args:
        name: the sampler's.
        v2: whether the runner is V2.

    Raises:
        SamplerError: as `resolve`, or the sampler has no class for that runner.
    """
    cls = resolve(name)
    if cls is None:
        return None
    if not v2:
        if not _derives(cls, RUNNER_V1):
            raise SamplerError(_wrong_runner(name, serves="V2", used="V1", switch=1))
        return cls
    if not _derives(cls, RUNNER_V2):
        if not hasattr(cls, "for_runner_v2"):
            raise SamplerError(_wrong_runner(name, serves="V1", used="V2", switch=0))
        cls = cls.for_runner_v2()
        if not (isinstance(cls, type) and _derives(cls, RUNNER_V2)):
            raise SamplerError(
                f"sampler {name!r}: for_runner_v2() returned {cls!r}, no subclass of {RUNNER_V2.replace(':', '.')}"
            )
    return cls


def _derives(cls: type, base: str) -> bool:
    """Return whether a class derives from the one that "module:Class" names."""
    return any(_target(ancestor) == base for ancestor in cls.__mro__)


def _wrong_runner(name: str, *, serves: str, used: str, switch: int) -> str:
    return (
        f"sampler {name!r} draws for vLLM's model runner {serves} only, and this server would use {used}: "
        f"set VLLM_USE_V2_MODEL_RUNNER={switch}, or start without --sampler"
    )


def _load(target: str) -> object:
    """Return what "module:Class" names."""
    module, _, attribute = target.partition(":")
    try:
        found: object = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing runs somebody else's code
        raise SamplerError(f"sampler {target!r} cannot be imported: {error}") from error
    return found


def _target(cls: type | str) -> str:
    """Return "module:Class" of a class."""
    return cls if isinstance(cls, str) else f"{cls.__module__}:{cls.__qualname__}"
