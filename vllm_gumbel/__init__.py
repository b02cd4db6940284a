"""Sampling for vLLM by the Gumbel-Max trick: exact, reproducible, observable.

Importing this package loads neither torch nor vLLM. Public names:

    SamplerSettings   what a server sets
    GumbelParams      what one request sets
    register_sampler  give a sampler of your own a name for `--sampler`
    seeds             what requests of an `LLM` with `gumbel_return_info` were drawn with
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_gumbel.integration.registry import register_sampler
    from vllm_gumbel.integration.replay import seeds
    from vllm_gumbel.params import GumbelParams
    from vllm_gumbel.settings import SamplerSettings

__version__ = version("vllm-gumbel")
__all__ = ["GumbelParams", "SamplerSettings", "__version__", "register_sampler", "seeds"]

_HOME = {
    "GumbelParams": "vllm_gumbel.params",
    "SamplerSettings": "vllm_gumbel.settings",
    "register_sampler": "vllm_gumbel.integration.registry",
    "seeds": "vllm_gumbel.integration.replay",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
