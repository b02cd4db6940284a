"""What one request may set: `GumbelParams`, flat keys in `SamplingParams.extra_args` or `vllm_xargs`.

vLLM hands `vllm_xargs` of the OpenAI API to `extra_args` unchanged; it takes strings, numbers and flat lists of them,
and turns JSON's true and false into 1 and 0 before anybody sees them. Every key of ours starts with `gumbel_`; keys of
others pass untouched.

Two tables are the whole of it: the fields of `GumbelParams`, with range, default, effect and cost, and
`CONTRADICTIONS`, the combinations that are refused. Every other combination composes.

A server may give keys defaults and add presets, its `ServerRules`. A key that the request sets wins; a default that
contradicts what the request asks is left out for that request, so that no default makes a request fail.
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from vllm_gumbel.text import shorten

PREFIX = "gumbel_"

#: vLLM carries integers between its processes as signed or unsigned 64-bit words.
SEED_RANGE = (-(2**63), 2**64 - 1)

#: What a request may call its user or conversation.
RolloutText = Annotated[str, StringConstraints(min_length=1, max_length=256)]
RolloutNumber = Annotated[int, Field(ge=SEED_RANGE[0], le=SEED_RANGE[1])]

#: Largest integer that vLLM's batch holds as `top_k`.
MOST_INT32 = 2**31 - 1

#: Temperature of a request that sets none, in `SamplingParams` and the OpenAI API; nobody can tell the two apart.
API_TEMPERATURE = 1.0

#: What `gumbel_preset` stands for: name -> temperature.
PRESETS: Mapping[str, float] = {"creative": 1.0, "factual": 0.7}


class ServerRules(NamedTuple):
    """What a server lays down for the keys of its requests.

    Attributes:
        presets: name -> temperature; all that there are.
        defaults: key -> value, where a request does not set the key.
    """

    presets: Mapping[str, float] = PRESETS
    defaults: Mapping[str, Any] = {}


#: A server that lays down nothing of its own.
NO_RULES = ServerRules()


class ParamsError(ValueError):
    """A request's parameter is refused; the message names the key, the rule and the value.

    Attributes:
        key: name of the parameter.
        value: what the request gave.
    """

    def __init__(self, key: str, rule: str, value: object) -> None:
        shown = key if len(key) <= 80 and key.isprintable() else shorten(key)  # a client may call its key anything
        super().__init__(f"{shown} {rule}, got {shorten(value)}")
        self.key = key
        self.value = value


def _key(default: Any, rule: str, *, values: str, unset: str, effect: str, cost: str, **bounds: Any) -> Any:
    """Return a field: its default and bounds, the rule as a refusal prints it, and its row of the table."""
    row: Any = {"range": values, "default": unset, "effect": effect, "cost": cost}
    return Field(default, description=rule, json_schema_extra=row, **bounds)


def _switch(value: object) -> object:
    """Return True and False for the 1 and 0 that the OpenAI API makes of them."""
    return bool(value) if type(value) is int and value in (0, 1) else value


class GumbelParams(BaseModel):
    """Parameters of one request, validated.

    Field descriptions say the rule in words, as the refusal prints it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    gumbel_sampler: Literal["gumbel", "default"] | None = _key(
        None,
        "must be 'gumbel' or 'default'",
        values="`gumbel`, `default`",
        unset="by the server's `rollout_fraction`",
        effect="`default`: this request is drawn by vLLM's own sampler, in its own noise; the law is the same up to "
        "vLLM's rounding and ties",
        cost="what vLLM's sampler costs, for this row",
    )
    gumbel_rollout_key: RolloutText | RolloutNumber | None = _key(
        None,
        "must be a text of 1 to 256 characters, or an integer from -2^63 to 2^64 - 1",
        values="text of 1 to 256 characters; integer, -2^63 to 2^64 - 1",
        unset="the request's id",
        effect="nothing: requests with one key, a user's say, are drawn by one sampler while the server's "
        "`rollout_fraction` stands",
        cost="none",
    )
    gumbel_salt: int | None = _key(
        None,
        "must be an integer from -2^63 to 2^64 - 1",
        values="integer, -2^63 to 2^64 - 1",
        unset="the server's `salt`",
        effect="nothing: other noise of the same law, so that equal positions of requests with one seed become "
        "independent",
        cost="none",
        ge=SEED_RANGE[0],
        le=SEED_RANGE[1],
    )
    gumbel_preset: str | None = _key(
        None,
        f"must be one of {', '.join(PRESETS)}",
        values=", ".join(f"`{name}`" for name in PRESETS) + ", the server's `presets`",
        unset="none",
        effect="a temperature: " + ", ".join(f"`{name}` {value:g}" for name, value in PRESETS.items()) + "; only where "
        "the request's own is 1, the API's default",
        cost="none",
    )
    gumbel_temperature_rule: Literal["none", "log_vocab"] = _key(
        "none",
        "must be 'none' or 'log_vocab'",
        values="`none`, `log_vocab`",
        unset="`none`",
        effect="`log_vocab` flattens: temperature times 1 + 0.1 ln V, which is 2.08 at V = 49,152. Gumbel-Max needs no "
        "such correction; greedy stays greedy",
        cost="none",
    )
    gumbel_hybrid_steps: int = _key(
        0,
        f"must be an integer from 0 to {MOST_INT32}",
        values="integer, 0 to 2^31 - 1",
        unset="0",
        effect="nothing: the first N generated tokens are drawn by inverting the distribution function of the same "
        "kept set, with one uniform number of their own stream; same law, other tokens",
        cost="about 1 ms a token at V = 49,152, for the first N",
        ge=0,
        le=MOST_INT32,
    )
    gumbel_top_n: int | None = _key(
        None,
        f"must be an integer from 1 to {MOST_INT32}",
        values="integer, 1 to 2^31 - 1",
        unset="no limit",
        effect="sharpens: only the n best ids take part, as with `top_k` n (of both the smaller holds); the mass given "
        "up is measured",
        cost="about 1 ms a token at V = 49,152, for the measurement",
        ge=1,
        le=MOST_INT32,
    )
    gumbel_tail_boost: float = _key(
        0.0,
        "must be a number from 0 to 10",
        values="0 to 10",
        unset="0",
        effect="flattens where few ids hold the mass: every logit gets c times the standard deviation of the row's "
        "finite logits times normal noise of its own stream, after penalties, before temperature",
        cost="about 4 ms a token at V = 49,152",
        ge=0,
        le=10,
        allow_inf_nan=False,
    )
    gumbel_repetition_offset: float = _key(
        0.0,
        "must be a number from 0 to 100",
        values="0 to 100",
        unset="0",
        effect="nothing until the generated text ends in at least 3 copies of a piece of 1 to 64 tokens; then the "
        "token that would continue the loop loses r times the number of copies",
        cost="a look at the last tokens",
        ge=0,
        le=100,
        allow_inf_nan=False,
    )
    gumbel_noise_scale: float = _key(
        1.0,
        "must be a number from 0 to 1",
        values="0 to 1",
        unset="1",
        effect="sharpens: noise times s, which is exactly temperature s on what the filters kept; 0 takes the best. "
        "Seed and position fix the noise, so values of s are coupled",
        cost="up to 4 ms a token at V = 49,152, less where filters keep few",
        ge=0,
        le=1,
        allow_inf_nan=False,
    )
    gumbel_return_info: Annotated[bool, BeforeValidator(_switch)] = _key(
        False,
        "must be true or false",
        values="true, false",
        unset="false",
        effect="nothing: the worker remembers seed and salt of the request, for `vllm_gumbel.seeds(llm)`, and logs "
        "them at debug level, so that it can be replayed",
        cost="none; the last 10,000 requests are remembered",
    )

    @classmethod
    def from_extra_args(
        cls,
        extra_args: Mapping[str, Any] | None,
        temperature: float = API_TEMPERATURE,
        rules: ServerRules = NO_RULES,
    ) -> "GumbelParams":
        """Return the parameters among `extra_args`, with the server's defaults; None stands for no extra arguments.

        Args:
            extra_args: of the request.
            temperature: of the request.
            rules: of the server.

        Raises:
            ParamsError: an unknown `gumbel_` key, a wrong type, a value out of range, or a contradiction.
        """
        given = {key: value for key, value in (extra_args or {}).items() if str(key).startswith(PREFIX)}
        defaults = {key: value for key, value in rules.defaults.items() if key not in given}
        if not given and not defaults:
            return _DEFAULT
        for key, value in given.items():
            require_known(key, value)
            if value is None:
                raise ParamsError(key, _rule(key, rules), value)
        while True:
            params = cls._validated({**defaults, **given}, rules)
            refused = _contradiction(params, temperature, rules)
            if refused is None:
                return params
            left_out = next((key for key in (refused.key, *refused.others) if key in defaults), None)
            if left_out is None:
                raise ParamsError(refused.key, f"contradicts {refused.other}: {refused.reason}", given[refused.key])
            del defaults[left_out]

    @classmethod
    def _validated(cls, values: Mapping[str, Any], rules: ServerRules) -> "GumbelParams":
        """Return parameters, each valid for itself."""
        try:
            params = cls(**values)
        except ValidationError as error:
            key = str(error.errors(include_input=False, include_url=False, include_context=False)[0]["loc"][0])
            raise ParamsError(key, _rule(key, rules), values[key]) from None
        if params.gumbel_preset is not None and params.gumbel_preset not in rules.presets:
            raise ParamsError("gumbel_preset", _rule("gumbel_preset", rules), params.gumbel_preset)
        return params

    @classmethod
    def table(cls) -> list[tuple[str, str, str, str, str]]:
        """Return one (key, range, default, effect, cost) per key, in order of definition."""
        rows = []
        for name, field in cls.model_fields.items():
            row: Any = field.json_schema_extra
            rows.append((name, row["range"], row["default"], row["effect"], row["cost"]))
        return rows

    @property
    def acts_on_rows(self) -> bool:
        """Whether a row needs work of its own at each draw, beyond parameters that are settled at admission."""
        return (
            self.gumbel_hybrid_steps > 0
            or self.gumbel_top_n is not None
            or self.gumbel_tail_boost > 0
            or self.gumbel_repetition_offset > 0
            or self.gumbel_noise_scale < 1
        )

    @property
    def uses_noise(self) -> bool:
        """Whether a key says something about our noise, which vLLM's own sampler does not draw with."""
        return any(used(self) for used in _USES_NOISE.values())

    def temperature(self, given: float, vocab: int, rules: ServerRules = NO_RULES) -> float:
        """Return the temperature of a request that gave `given`, for a vocabulary of `vocab` ids."""
        tau = given if self.gumbel_preset is None else rules.presets[self.gumbel_preset]
        return tau * (1 + 0.1 * math.log(vocab)) if self.gumbel_temperature_rule == "log_vocab" else tau

    def top_k(self, given: int) -> int:
        """Return the `top_k` of a request that gave `given`, which is no limit where it is not positive."""
        if self.gumbel_top_n is None:
            return given
        return min(given, self.gumbel_top_n) if given > 0 else self.gumbel_top_n


class Asked(NamedTuple):
    """What a request asks for, as far as parts of it can contradict each other.

    Attributes:
        params: its keys.
        temperature: its own.
        tau: what a preset makes of that.
    """

    params: GumbelParams
    temperature: float
    tau: float

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn at random."""
        return self.tau < 1e-5  # as in `kernels.contract`, which needs NumPy


class Contradiction(NamedTuple):
    """Two things that a request cannot ask for together.

    Attributes:
        key: the key that is refused.
        other: what it contradicts, as the refusal names it.
        others: the keys that may have set that other thing.
        reason: why.
        holds: whether a request asks for both.
    """

    key: str
    other: str
    others: tuple[str, ...]
    reason: str
    holds: Callable[[Asked], bool]


#: The keys that say something about our noise, and whether parameters make use of them.
_USES_NOISE: Mapping[str, Callable[[GumbelParams], bool]] = {
    "gumbel_salt": lambda params: params.gumbel_salt is not None,
    "gumbel_hybrid_steps": lambda params: params.gumbel_hybrid_steps > 0,
    "gumbel_tail_boost": lambda params: params.gumbel_tail_boost > 0,
    "gumbel_noise_scale": lambda params: params.gumbel_noise_scale < 1,
    "gumbel_return_info": lambda params: params.gumbel_return_info,
}


def _with_stock_sampler(key: str) -> Contradiction:
    used = _USES_NOISE[key]
    return Contradiction(
        key,
        "gumbel_sampler 'default'",
        ("gumbel_sampler",),
        "vLLM's own sampler does not draw with this noise",
        lambda asked: asked.params.gumbel_sampler == "default" and used(asked.params),
    )


def _with_greedy(key: str, reason: str, used: Callable[[GumbelParams], bool]) -> Contradiction:
    return Contradiction(
        key, "temperature 0", ("gumbel_preset",), reason, lambda asked: asked.is_greedy and used(asked.params)
    )


#: Everything that is refused though each part alone is valid. Greedy decoding needs no noise, so keys that merely have
#: no effect on it pass (a salt, say); those whose only meaning is to make the token random do not.
CONTRADICTIONS = (
    *(_with_stock_sampler(key) for key in _USES_NOISE),
    Contradiction(
        "gumbel_preset",
        "temperature",
        (),
        "a preset sets the temperature, so the request must leave it at 1, the API's default",
        lambda asked: asked.params.gumbel_preset is not None and asked.temperature != API_TEMPERATURE,
    ),
    _with_greedy("gumbel_hybrid_steps", "greedy decoding draws nothing at random", _USES_NOISE["gumbel_hybrid_steps"]),
    _with_greedy("gumbel_tail_boost", "greedy decoding has no noise", _USES_NOISE["gumbel_tail_boost"]),
    _with_greedy(
        "gumbel_noise_scale", "greedy decoding has no noise to scale", lambda params: 0 < params.gumbel_noise_scale < 1
    ),
)


def _contradiction(params: GumbelParams, temperature: float, rules: ServerRules) -> Contradiction | None:
    """Return the first contradiction in what a request asks for, None if there is none."""
    tau = temperature if params.gumbel_preset is None else rules.presets[params.gumbel_preset]
    asked = Asked(params, temperature, tau)
    return next((each for each in CONTRADICTIONS if each.holds(asked)), None)


def _rule(key: str, rules: ServerRules) -> str:
    """Return the rule of a key in words, as a refusal prints it."""
    if key == "gumbel_preset":
        return f"must be one of {', '.join(rules.presets)}"
    return str(GumbelParams.model_fields[key].description)


_DEFAULT = GumbelParams()


def require_known(key: str, value: object) -> None:
    """Raise `ParamsError` for a key that there is not."""
    if key not in GumbelParams.model_fields:
        raise ParamsError(key, f"is not a known parameter (known: {', '.join(GumbelParams.model_fields)})", value)


def check_seed(seed: int | None) -> None:
    """Raise `ParamsError` for a seed that does not fit a 64-bit word."""
    if seed is not None and not SEED_RANGE[0] <= seed <= SEED_RANGE[1]:
        raise ParamsError("seed", "must be an integer from -2^63 to 2^64 - 1", seed)
