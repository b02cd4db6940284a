"""What a server sets: `SamplerSettings`, from `--sampler-config`, `additional_config` or the environment.

Given values win over environment variables, those over defaults; of objects, name by name. An environment variable is
`GUMBEL_` and the field's name in capitals (not `VLLM_...`, which vLLM reports as unknown); objects are JSON there. They
are read once, in the process that builds vLLM's configuration, and travel from there to every worker.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings import SettingsError as SourceError

from vllm_gumbel.params import PRESETS, GumbelParams, ParamsError, ServerRules, require_known
from vllm_gumbel.text import shorten


def _no_boolean(value: object) -> object:
    """Refuse True and False where an integer is meant; pydantic takes them for 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return value


def _temperature(value: float) -> float:
    """Refuse a temperature that a request could not ask for: vLLM raises those between 0 and 0.01."""
    if value != 0 and not 0.01 <= value <= 2:
        raise PydanticCustomError("temperature", "Input should be 0 or a number from 0.01 to 2")
    return value


Integer = Annotated[int, BeforeValidator(_no_boolean)]
PresetName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
PresetTemperature = Annotated[float, Field(strict=True), AfterValidator(_temperature)]


class SettingsError(ValueError):
    """A server-wide setting is malformed, unknown or out of range; the message names it, the rule and the value."""


class SamplerSettings(BaseSettings):
    """Server-wide settings of the sampler `gumbel`.

    The field descriptions are the documentation; `table()` and `vllm-gumbel settings` print them.
    """

    model_config = SettingsConfigDict(env_prefix="GUMBEL_", extra="forbid", frozen=True)

    backend: Literal["auto", "triton", "numba", "reference"] = Field(
        "auto",
        description="Which implementation draws; `auto` takes the best one that loads and logs why. `triton` draws on "
        "accelerators, with runner V2 only.",
    )
    threads: Integer | None = Field(
        None,
        ge=1,
        description="How many threads draw a batch; as many as vLLM gave the worker for torch if unset. More than that "
        "compete with vLLM's own.",
    )
    on_bad_row: Literal["stop", "lowest"] = Field(
        "stop",
        description="What a row without any finite logit yields: `stop` emits the request's end-of-sequence token, "
        "so that it ends now; `lowest` emits id 0, for tests. Counted either way.",
    )
    salt: Integer = Field(
        0,
        ge=-(2**63),
        lt=2**64,
        description="Mixed into the seed of every request that sets no `gumbel_salt` of its own.",
    )
    presets: dict[PresetName, PresetTemperature] = Field(
        {},
        description="What `gumbel_preset` may name beside `creative` and `factual`, or in their place: an object of "
        "names and temperatures, 0 or 0.01 to 2.",
    )
    request_defaults: dict[str, Any] = Field(
        {},
        description="What a request's keys are where it does not set them: an object of keys and values. A default "
        "that contradicts what a request asks is left out for it.",
    )
    noise: Literal["own", "stock"] = Field(
        "own",
        description="Which noise decides: `own`, or with runner V2 and backend `triton` also `stock`, the noise of "
        "vLLM's own kernel, so that a seeded request gives the token that vLLM gives.",
    )
    verification: Literal["exact", "rejection"] = Field(
        "exact",
        description="How drafts are verified: `exact` accepts a draft that is the token drawn anyway; `rejection`, "
        "with runner V2 only, is vLLM's way, which accepts more drafts of drafters that sample and keeps the law, not "
        "the tokens.",
    )
    on_unsupported_vllm: Literal["refuse", "stock"] = Field(
        "refuse",
        description="What a server does under a version of vLLM that this package does not support: `refuse` to start, "
        "or let vLLM's own sampler (`stock`) draw, with a warning in the log.",
    )
    metrics: bool = Field(True, description="Whether the worker counts what it draws; false switches off all below.")
    metrics_address: str | None = Field(
        None,
        pattern=r"^[^:\s]+:[0-9]{1,5}$",
        description="HOST:PORT at which a worker serves its node's metrics too, the port plus the index of its "
        "data-parallel replica; for servers over several nodes, whose `/metrics` shows its own node only.",
    )
    watch: float = Field(
        0.125,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="Share of the tokens whose distribution is looked at, chosen independently of what is drawn, so "
        "that no choice biases the evidence; 0 switches it off.",
    )
    watch_loops: bool = Field(True, description="Whether loops and runs in generated texts are counted.")
    watch_glitches: bool = Field(
        True, description="Whether glitch tokens are counted; their list is made once per model and cached."
    )
    watch_frequencies: bool = Field(True, description="Whether each token's frequency is counted.")
    watch_time: bool = Field(True, description="Whether the time in the sampler is measured.")
    improbable_below: float = Field(
        1e-6,
        gt=0,
        lt=1,
        allow_inf_nan=False,
        description="Probability, at temperature 1 without filters, below which a drawn token counts as improbable.",
    )
    token_profile: str | None = Field(
        None,
        description="Path of a profile, written by `vllm-gumbel profile`, from which the KL of the token frequencies "
        "is measured.",
    )

    rollout_fraction: float = Field(
        1.0,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="Share of the requests that this sampler draws; vLLM's own draws the others. `gumbel_sampler` "
        "decides for the request that sets it, else a hash of its `gumbel_rollout_key`, else of its id.",
    )
    rollout_shadow: float = Field(
        0.0,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="Share of the requests drawn by vLLM's own sampler for which this one draws too, to be measured; "
        "nothing that a client sees changes.",
    )
    rollout_state: str | None = Field(
        None,
        description="Path of a file that keeps what `vllm-gumbel rollout` sets, and an open breaker, over restarts; "
        "if it is there, it wins over `rollout_fraction` and `rollout_shadow`.",
    )
    breaker_rate: float = Field(
        0.001,
        ge=0,
        lt=0.1,
        allow_inf_nan=False,
        description="Tolerated share of draws that cannot be right; above it the breaker opens, and new requests go "
        "to vLLM's own sampler. 0 for no breaker.",
    )

    @property
    def rules(self) -> ServerRules:
        """What these settings lay down for the keys of requests."""
        return ServerRules({**PRESETS, **self.presets}, self.request_defaults)

    @field_validator("request_defaults")
    @classmethod
    def _check_defaults(cls, defaults: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Refuse defaults that no request could set, by the rules for requests; `salt` has a field of its own."""
        if "presets" not in info.data:  # refused already
            return defaults
        try:
            for key, value in defaults.items():
                require_known(key, value)
                if key == "gumbel_salt":
                    raise ParamsError(key, "is set for all requests by the setting `salt`", value)
            GumbelParams.from_extra_args(defaults, rules=ServerRules({**PRESETS, **info.data["presets"]}))
        except ParamsError as error:
            raise PydanticCustomError("request_default", "{said}", {"said": str(error)}) from None
        return defaults

    @classmethod
    def table(cls) -> list[tuple[str, str, str, str]]:
        """Return one (field, environment variable, default, description) per setting, in order of definition."""
        rows = []
        for name, field in cls.model_fields.items():
            default = "unset" if field.default is None else json.dumps(field.default)
            rows.append((name, f"GUMBEL_{name.upper()}", default, field.description or ""))
        return rows


def parse(given: Mapping[str, Any] | None) -> SamplerSettings:
    """Return the settings from a mapping and the environment.

    Raises:
        SettingsError: an unknown key, a wrong type or a value out of range.
    """
    known = {key: value for key, value in (given or {}).items() if key in SamplerSettings.model_fields}
    unknown = [key for key in given or {} if key not in known]
    problems = []
    settings = None
    try:
        settings = SamplerSettings(**known)
    except ValidationError as error:
        problems += [_describe(item) for item in error.errors()]
    except SourceError as error:  # a variable that is no JSON
        problems.append(f"{error}: {error.__cause__}, got {shorten(getattr(error.__cause__, 'doc', None))}")
    if unknown:
        names = ", ".join(shorten(key) for key in unknown)
        problems.append(f"unknown key {names}; known: {', '.join(SamplerSettings.model_fields)}")
    if settings is None or problems:
        raise SettingsError(f"sampler config: {'; '.join(problems)}")
    return settings


def load(text: str) -> dict[str, Any]:
    """Return the mapping that `--sampler-config` means: JSON text, or the path of a .json, .yaml or .yml file.

    Raises:
        SettingsError: malformed text, an unreadable file, another suffix, or something other than a mapping.
    """
    source = "sampler config"
    stripped = text.strip()
    if not stripped.startswith("{"):
        try:
            path = Path(stripped).expanduser()
        except RuntimeError as error:
            raise SettingsError(f"sampler config file {text!r} cannot be read: {error}") from None
        source = f"sampler config file {path}"
        if path.suffix not in {".json", ".yaml", ".yml"}:
            raise SettingsError(
                f"sampler config must be a JSON object or the path of a .json or .yaml file, got {text!r}"
            )
        try:
            stripped = path.read_text()
        except OSError as error:
            raise SettingsError(f"{source} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise SettingsError(f"{source} is no text: {error}") from None
    try:
        value = yaml.safe_load(stripped) if source.endswith((".yaml", ".yml")) else json.loads(stripped)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"{source} is malformed: {error}") from None
    if not isinstance(value, dict):
        raise SettingsError(f"{source} must be an object of settings, got {type(value).__name__}")
    return value


def _describe(item: Mapping[str, Any]) -> str:
    """Return one pydantic problem as "field: rule, got value"."""
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "request_default":  # names key and value itself
        return f"{name}: {item['msg']}"
    return f"{name}: {item['msg']}, got {shorten(item['input'])}"
