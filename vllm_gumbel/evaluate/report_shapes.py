"""What a report reads: the shapes of results of `compare`, `verify`, `rollout` and of the knob study.

Only what a page shows is named here; what else a file holds is left alone. Texts are made harmless and short where they
come in, so that whatever is put into a page has been through `words.clean`.
"""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from vllm_gumbel.evaluate.words import TEXT_LIMIT, clean

Name = Annotated[str, AfterValidator(clean)]
Text = Annotated[str, AfterValidator(partial(clean, limit=TEXT_LIMIT))]
Says = Annotated[str, AfterValidator(partial(clean, limit=500))]
Count = Annotated[int, Field(ge=0, le=10**15)]
Share = Annotated[float, Field(ge=0, le=1)]
#: JSON has lists where Python has tuples.
List = Field(strict=False)


class Shape(BaseModel):
    """Part of a file: numbers are numbers, and finite."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


class Side(Shape):
    """One side of a comparison."""

    name: Name | None = None
    model: Name | None = None
    url: Name | None = None
    sampler: Name | None = None
    noise_version: int | None = None
    settings: dict[Name, Any] = Field(default_factory=dict)

    @property
    def shown(self) -> str:
        """What it is called."""
        return self.name or self.model or self.url or "without a name"


class Measure(Shape):
    """One measure of a comparison; of a divergence there is one `value`, of others a difference."""

    name: Name
    title: Name
    kind: Literal["quality", "divergence", "speed"]
    better: Literal["higher", "lower"] | None = None
    baseline: float | None = None
    candidate: float | None = None
    value: float | None = None
    independent_value: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    level: Share = 0.95
    variance_reduction: float | None = None
    variance_reduction_low: float | None = None
    variance_reduction_high: float | None = None
    texts: Count | None = None

    @property
    def differs(self) -> bool:
        """Whether the interval of the difference excludes 0."""
        return self.known and not (self.low or 0) <= 0 <= (self.high or 0)

    @property
    def known(self) -> bool:
        """Whether there is a difference with its interval."""
        return None not in (self.difference, self.low, self.high)

    @property
    def worse(self) -> bool:
        """Whether the candidate is worse, as far as one direction is better."""
        return self.differs and self.better is not None and ((self.difference or 0) < 0) == (self.better == "higher")


class Agreement(Shape):
    """How far texts go together."""

    tokens: Count
    agree: Count
    share: Share | None = None
    low: Share | None = None
    high: Share | None = None
    median_divergence: float | None = None
    curve: list[Annotated[tuple[Count, Share | None, Share | None, Share | None], List]] = Field(default_factory=list)


class Frequencies(Shape):
    """How often tokens were said: token, share of the baseline, share of the candidate."""

    unit: Name = "token"
    tokens: list[Annotated[tuple[Name | int | None, Share, Share], List]] = Field(default_factory=list)


class FirstToken(Shape):
    """Times to the first token, at the quantiles of the whole latency."""

    baseline: list[float] | None = None
    candidate: list[float] | None = None


class Quantiles(Shape):
    """Quantiles of both sides."""

    quantiles: list[Share] = Field(default_factory=list)
    baseline: list[float] | None = None
    candidate: list[float] | None = None
    first_token: FirstToken | None = None

    @model_validator(mode="after")
    def _as_many_values(self) -> "Quantiles":
        """Check that every quantile has its value."""
        for name, values in (("baseline", self.baseline), ("candidate", self.candidate)):
            if values and len(values) != len(self.quantiles):
                raise ValueError(f"{name} has {len(values)} values of {len(self.quantiles)} quantiles")
        return self

    def of_first_token(self) -> "Quantiles | None":
        """Return the quantiles of the times to the first token; None if they are not known."""
        first = self.first_token
        if first is None:
            return None
        return Quantiles(quantiles=self.quantiles, baseline=first.baseline, candidate=first.candidate)


class TokensNeeded(Shape):
    """Tokens for an interval of one width, with and without common noise."""

    coupled: float | None = None
    independent: float | None = None
    half_width: float | None = None
    measure: Name | None = None


class Pair(Shape):
    """Two texts of one prompt and seed."""

    id: Name | None = None
    task: Name | None = None
    prompt: Text | list[dict[str, Any]] | None = None
    baseline: Text | None = None
    candidate: Text | None = None
    diverges_at: Count | None = None


class Comparison(Shape):
    """`comparison.json`."""

    kind: Literal["comparison"]
    version: Literal[1]
    created: Name | None = None
    question: dict[Name, Any] = Field(default_factory=dict)
    baseline: Side
    candidate: Side
    coupled: bool
    coupling: Says = ""
    same_machine: bool | None = None
    prompts: Count
    seeds: Count
    pairs: Count
    asked: Count | None = None
    unit: Name = "token"
    failed: dict[Name, Count] = Field(default_factory=dict)
    failures: dict[Name, list[Annotated[tuple[Name, Says], List]]] = Field(default_factory=dict)
    measures: list[Measure]
    agreement: Agreement | None = None
    by_task: dict[Name, list[Measure]] = Field(default_factory=dict)
    tokens_for_interval: TokensNeeded | None = None
    token_frequencies: Frequencies | None = None
    lengths: Quantiles | None = None
    latency: Quantiles | None = None
    notes: list[Says] = Field(default_factory=list)
    examples: list[Pair] = Field(default_factory=list)

    def redacted(self) -> "Comparison":
        """Return it without texts and tokens."""
        found = self.token_frequencies
        if found is not None:
            nameless = [(None, *shares) for _, *shares in found.tokens]
            found = found.model_copy(update={"tokens": nameless})
        return self.model_copy(update={"examples": [], "failures": {}, "token_frequencies": found})


class Position(Shape):
    """One token of a verification."""

    token: int | None = None
    text: Name | None = None
    match: bool
    kept: bool | None = None
    margin: float | None = None
    rank: Count | None = None
    probability: float | None = None


class Verified(Shape):
    """One record of a verification."""

    id: Name
    verdict: Literal["matches", "differs", "undecided", "unreadable"]
    explanation: Says | None = None
    tokens: Count = 0
    matched: Count = 0
    evidence_against: float | None = None
    evidence_for: float | None = None
    decided_at: Count | None = None
    notes: list[Says] = Field(default_factory=list)
    positions: list[Position] = Field(default_factory=list)


class Totals(Shape):
    """What the records of a verification say together."""

    tokens: Count = 0
    matched: Count = 0
    expected_false_alarms: float | None = None
    chance_of_so_many: float | None = None
    summary: Says | None = None


class Verification(Shape):
    """What `verify --json` writes."""

    kind: Literal["verification"]
    version: Literal[1]
    created: Name | None = None
    model: Name | None = None
    precision: Name | None = None
    server_precision: Name | None = None
    alpha: Share
    records: list[Verified]
    totals: Totals = Totals()
    notes: list[Says] = Field(default_factory=list)

    def redacted(self) -> "Verification":
        """Return it without texts and tokens."""
        records = [
            record.model_copy(
                update={
                    "positions": [each.model_copy(update={"token": None, "text": None}) for each in record.positions]
                }
            )
            for record in self.records
        ]
        return self.model_copy(update={"records": records})


class Gate(Shape):
    """What one gate of a rollout says."""

    gate: Name
    outcome: Literal["pass", "fail", "unknown", "shown"]
    says: Says = ""
    p_value: float | None = None
    rate: float | None = None
    finds: float | None = None


class Look(Shape):
    """One look at a stage."""

    stage: Name
    look: Count
    outcome: Literal["pass", "fail", "unknown"]
    began: float | None = None
    ended: float | None = None
    results: list[Gate]


class Rollout(Shape):
    """What `rollout run --json` writes."""

    server: Name
    prometheus: Name | None = None
    stages: Name
    hold_seconds: float | None = None
    alpha: float | None = None
    set_back_seconds: float | None = None
    exit_code: int | None = None
    looks: list[Look]


class Setting(Shape):
    """The figures of one setting of a study."""

    kl_nats: float | None = None
    entropy_nats: float | None = None
    kept_ids: float | None = None
    mean_logprob: float | None = None
    distinct_1: float | None = None
    distinct_2: float | None = None
    distinct_3: float | None = None
    loop_rate: float | None = None
    loop_share: float | None = None
    tokens_per_second: float | None = None
    throughput_ratio: float | None = None
    stock_ratio: float | None = None


class Study(Shape):
    """What `scripts/study_knobs.py` writes."""

    prompts: Count | None = None
    rows: Count | None = None
    tokens: Count | None = None
    rounds: Count | None = None
    batch: Count | None = None
    batch_tokens: Count | None = None
    settings: dict[Name, Setting] = Field(min_length=1)
