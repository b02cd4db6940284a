"""What a server sets: `SamplerSettings`, from `--sampler-config`, `additional_config` or the environment.

Given values win over environment variables, those over defaults. An environment variable is `GUMBEL_` and the field's
name in capitals (not `VLLM_...`, which vLLM reports as unknown). They are read once, in the process that builds
vLLM's configuration, and travel from there to every worker.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from vllm_gumbel.params import shorten


def _no_boolean(value: object) -> object:
    """Refuse True and False where an integer is meant; pydantic takes them for 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return value


Integer = Annotated[int, BeforeValidator(_no_boolean)]


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
    metrics: bool = Field(True, description="Whether the worker counts what it draws.")

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
    return f"{name}: {item['msg']}, got {shorten(item['input'])}"
