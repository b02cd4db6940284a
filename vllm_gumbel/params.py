"""What one request may set: `GumbelParams`, flat keys in `SamplingParams.extra_args` or `vllm_xargs`.

vLLM hands `vllm_xargs` of the OpenAI API to `extra_args` unchanged; it takes strings, numbers and flat lists of them.
Every key of ours starts with `gumbel_`; keys of others pass untouched.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PREFIX = "gumbel_"

#: vLLM carries integers between its processes as signed or unsigned 64-bit words.
SEED_RANGE = (-(2**63), 2**64 - 1)


class ParamsError(ValueError):
    """A request's parameter is refused; the message names the key, the rule and the value.

    Attributes:
        key: name of the parameter.
        value: what the request gave.
    """

    def __init__(self, key: str, rule: str, value: object) -> None:
        super().__init__(f"{key} {rule}, got {shorten(value)}")
        self.key = key
        self.value = value


class GumbelParams(BaseModel):
    """Parameters of one request, validated.

    Field descriptions say the rule in words, as the refusal prints it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    gumbel_salt: int | None = Field(
        None,
        ge=SEED_RANGE[0],
        le=SEED_RANGE[1],
        description="must be an integer from -2^63 to 2^64 - 1",
    )

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> "GumbelParams":
        """Return the parameters among `extra_args`; None stands for no extra arguments.

        Raises:
            ParamsError: an unknown `gumbel_` key, a wrong type, or a value out of range.
        """
        given = {key: value for key, value in (extra_args or {}).items() if str(key).startswith(PREFIX)}
        if not given:
            return _DEFAULT
        for key, value in given.items():
            if key not in cls.model_fields:
                raise ParamsError(key, f"is not a known parameter (known: {', '.join(cls.model_fields)})", value)
            if value is None:
                raise ParamsError(key, str(cls.model_fields[key].description), value)
        try:
            return cls(**given)
        except ValidationError as error:
            key = str(error.errors(include_input=False, include_url=False, include_context=False)[0]["loc"][0])
            raise ParamsError(key, str(cls.model_fields[key].description), given[key]) from None


_DEFAULT = GumbelParams()


def check_seed(seed: int | None) -> None:
    """Refuse a seed that does not fit a 64-bit word.

    Raises:
        ParamsError: the seed lies outside -2^63 to 2^64 - 1.
    """
    if seed is not None and not SEED_RANGE[0] <= seed <= SEED_RANGE[1]:
        raise ParamsError("seed", "must be an integer from -2^63 to 2^64 - 1", seed)


def shorten(value: object, limit: int = 80) -> str:
    """Return `repr(value)`, cut to `limit` characters, since a client may send anything."""
    try:
        text = repr(value)
    except ValueError:  # an integer too long for Python to print
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
