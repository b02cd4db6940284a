"""Which sampler a server chose, with which settings: from the command line and `LLM(...)` to every worker.

The choice lives in vLLM's `additional_config`, keys `sampler` and `sampler_config`: that dictionary is part of the
configuration which vLLM hands to each of its processes. vLLM hashes its JSON into the key of its compile cache, which
must not depend on how tokens are drawn; so the settings travel in a dictionary that is empty as JSON.
"""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_gumbel import settings
from vllm_gumbel.integration import registry
from vllm_gumbel.settings import SamplerSettings, SettingsError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Keys of `additional_config`.
SAMPLER, SAMPLER_CONFIG = "sampler", "sampler_config"

#: Chooses the sampler where neither flag nor `additional_config` does.
SAMPLER_VARIABLE = "GUMBEL_SAMPLER"


@dataclass(frozen=True)
class Choice:
    """A sampler's name and the server-wide settings."""

    name: str
    settings: SamplerSettings

    @property
    def is_default(self) -> bool:
        """Whether vLLM's own sampler draws."""
        return self.name == registry.DEFAULT


class CarriedSettings(dict[str, Any]):
    """Settings on their way to a worker: an attribute of a dictionary that stays empty."""

    def __init__(self, carried: SamplerSettings | None = None) -> None:
        super().__init__()
        self.carried = carried


def read(additional_config: object) -> Choice:
    """Return the choice that `additional_config` expresses, else the environment, else vLLM's own sampler.

    Raises:
        SamplerError: unknown or doubly claimed sampler.
        SettingsError: unknown, malformed or out-of-range settings.
    """
    given = additional_config if isinstance(additional_config, Mapping) else {}
    name = given.get(SAMPLER, os.environ.get(SAMPLER_VARIABLE, registry.DEFAULT))
    config = given.get(SAMPLER_CONFIG)
    if not isinstance(name, str):
        raise registry.SamplerError(f"sampler must be a name, got {name!r}")
    if isinstance(config, CarriedSettings) and config.carried is not None:
        return Choice(name, config.carried)
    if config is not None and not isinstance(config, Mapping):
        raise SettingsError(f"sampler_config must be an object of settings, got {config!r}")
    if name == registry.DEFAULT and config is None:
        return Choice(name, SamplerSettings.model_construct())
    return Choice(registry.check_name(name), settings.parse(config))


def carry(choice: Choice, config: "VllmConfig") -> None:
    """Write `choice`, resolved, into a configuration that goes to the workers."""
    config.additional_config = {
        **config.additional_config,
        SAMPLER: choice.name,
        SAMPLER_CONFIG: CarriedSettings(choice.settings),
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--sampler` and `--sampler-config` in a group of their own."""
    fields = "\n".join(
        f"- {name} (default {default}; environment {variable}): {text}"
        for name, variable, default, text in SamplerSettings.table()
    )
    group = parser.add_argument_group(
        title="Sampler", description="Which sampler draws the tokens (vllm-gumbel); without these flags vLLM's own."
    )
    group.add_argument(
        "--sampler",
        type=_sampler_name,
        default=None,
        metavar="{default,gumbel,module:Class}",
        help="The sampler: `default` is vLLM's own, `gumbel` draws by the Gumbel-Max trick with noise that depends on "
        "seed, position and token only, a name that another package registered, or `module:Class`. "
        f"Default: the environment variable {SAMPLER_VARIABLE}, else `default`.",
    )
    group.add_argument(
        "--sampler-config",
        type=_sampler_config,
        default=None,
        metavar="JSON_OR_FILE",
        help=f"Settings of the sampler `gumbel`: a JSON object, or a .json or .yaml file.\n{fields}",
    )


def merge_flags(args: argparse.Namespace) -> None:
    """Put what the flags say into `args.additional_config`.

    Raises:
        SamplerError, SettingsError: a flag contradicts `--additional-config`.
    """
    given = getattr(args, "additional_config", None)
    if not isinstance(given, Mapping | None):  # vLLM allows an object with a hash of its own
        flags = [
            flag
            for key, flag in ((SAMPLER, "--sampler"), (SAMPLER_CONFIG, "--sampler-config"))
            if getattr(args, key, None)
        ]
        if flags:
            raise registry.SamplerError(f"{flags[0]} needs --additional-config to be an object, got {given!r}")
        return
    additional = dict(given or {})
    for key, flag, error in (
        (SAMPLER, "--sampler", registry.SamplerError),
        (SAMPLER_CONFIG, "--sampler-config", SettingsError),
    ):
        value = getattr(args, key, None)
        if value is None:
            continue
        if additional.get(key, value) != value:
            raise error(f"{flag} says {value!r} and --additional-config says {additional[key]!r}: give one of them")
        additional[key] = value
    if additional:
        args.additional_config = additional


def _sampler_name(text: str) -> str:
    try:
        return registry.check_name(text)
    except registry.SamplerError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _sampler_config(text: str) -> dict[str, Any]:
    try:
        config = settings.load(text)
        settings.parse(config)
    except SettingsError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return config
