"""The one table of metrics: names, types, labels, help."""

from dataclasses import dataclass
from enum import StrEnum

PREFIX = "vllm_gumbel_"

#: Labels that every metric of a worker carries.
COMMON_LABELS = ("model_name", "engine", "arm")


#: The samplers that may draw a row: values of the label `arm`.
GUMBEL, DEFAULT = "gumbel", "default"
ARMS = (GUMBEL, DEFAULT)

#: A further value of that label: what `gumbel` drew beside a token of `default` that was sent.
SHADOW = "shadow"


class AnomalyKind(StrEnum):
    """Values of the label `kind` of `anomalous_tokens_total`."""

    NONFINITE_LOGITS = "nonfinite_logits"
    NO_CANDIDATE = "no_candidate"
    PADDED_ID = "padded_id"
    OUTSIDE_FILTER = "outside_filter"
    IMPROBABLE = "improbable"
    REPETITION = "repetition"
    GLITCH = "glitch"


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    Attributes:
        name: without prefix, and without `_total` for a counter.
        kind: "counter", "gauge", "histogram" or "summary", which is shown as a sum and a count.
        help: one sentence, with the unit.
        labels: names beyond those a metric carries anyway.
        common: whether it carries `COMMON_LABELS`.
        buckets: upper bounds of a histogram, without infinity.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    common: bool = True
    buckets: tuple[float, ...] = ()

    @property
    def exposed_name(self) -> str:
        """Name as it stands on `/metrics`."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    @property
    def label_names(self) -> tuple[str, ...]:
        """All labels, in order."""
        return (COMMON_LABELS if self.common else ()) + self.labels


SAMPLED_TOKENS = Metric("sampled_tokens", "counter", "Tokens drawn, without discarded draws of unfinished prompts.")
REQUESTS = Metric("requests", "counter", "Requests that entered the batch for the first time.")
ANOMALOUS_TOKENS = Metric(
    "anomalous_tokens",
    "counter",
    "Draws in which something was wrong, by kind; improbable and outside_filter among watched tokens only.",
    ("kind",),
)
WATCHED_TOKENS = Metric(
    "watched_tokens", "counter", "Tokens whose distribution was looked at, a share of all chosen independently of them."
)
EXPECTED_IMPROBABLE = Metric(
    "improbable_expected_tokens",
    "counter",
    "How many of the watched tokens an exact sampler draws improbable: the sum of the rows' tail masses.",
)
TESTED_TOKENS = Metric(
    "tested_tokens", "counter", "Watched tokens drawn at random by a request without a seed: those the next ones sum."
)
SURPRISAL = Metric("surprisal_nats", "counter", "Sum of -ln p of the tested tokens under the law they are drawn from.")
ENTROPY = Metric("entropy_nats", "counter", "Sum of the entropies of the laws of the tested tokens, in nats.")
SURPRISAL_VARIANCE = Metric(
    "surprisal_variance_nats2",
    "counter",
    "Sum of the variances of the tested tokens' surprisals; (surprisal - entropy) / sqrt(variance) is N(0,1) if exact.",
)
SCORE_PIT = Metric(
    "score_pit",
    "counter",
    "Tested tokens by twentieth of exp(-exp(-(winning score - logsumexp))), which is uniform if the draw is exact.",
    ("bin",),
)
SCORE_SQUARES = Metric(
    "score_squares", "counter", "Sum of z^2 over tested tokens, z the normal score of the number that score_pit bins."
)
SCORE_STEP_SQUARES = Metric(
    "score_step_squares",
    "counter",
    "Sum over steps of (sum of z)^2; less score_squares it is 0 on average if exact.",
)
SCORE_PAIRS = Metric(
    "score_pairs", "counter", "Ordered pairs of tested tokens within a step; twice this is the variance of that."
)
KEPT_TOKENS = Metric(
    "kept_tokens",
    "histogram",
    "Ids left after the filters of a watched token.",
    buckets=(1, 2, 5, 10, 20, 50, 100, 500, 1000, 5000, 20000, 100000),
)
TOKEN_RUN_LENGTH = Metric(
    "token_run_length",
    "histogram",
    "Lengths of the runs of one token in generated texts, counted when a run ends; 1 is no repetition.",
    buckets=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64),
)
SAMPLER_SECONDS = Metric(
    "sampler_seconds",
    "histogram",
    "Seconds in the sampler per step; the rate of its sum is the sampler's share of the time.",
    buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5),
)
TOKEN_FREQUENCY_KL = Metric(
    "token_frequency_kl_nats",
    "gauge",
    "KL of an arm's token frequencies from those of the reference: the other arm, or a stored profile.",
    ("reference",),
)
FAULTS = Metric("faults", "counter", "Errors inside the sampler's own bookkeeping; tokens kept flowing.", ("part",))
TOP_N_GIVEN_UP = Metric(
    "top_n_given_up_mass",
    "summary",
    "Share of a row's mass, at its temperature, that gumbel_top_n leaves out; one observation a token that sets it.",
)
SHADOW_TOKENS = Metric(
    "shadow_tokens",
    "counter",
    "Tokens drawn in shadow, by whether they are those that vLLM's own sampler drew and that were sent.",
    ("result",),
)
FALLBACKS = Metric(
    "fallbacks",
    "counter",
    "What could not be done as asked: kernel, a step drawn by the reference; breaker, a request that chose the gumbel "
    "arm; keys, a request of the default arm with keys that only the gumbel arm honours.",
    ("reason",),
)
ROLLOUT_FRACTION = Metric(
    "rollout_fraction", "gauge", "Share of the requests without a choice of their own that the gumbel arm is to get."
)
ROLLOUT_SHADOW = Metric("rollout_shadow", "gauge", "Share of the default arm's requests that are drawn in shadow.")
BREAKER_OPEN = Metric("breaker_open", "gauge", "1 while all new requests go to vLLM's own sampler, else 0.")
REJECTED_PARAMS = Metric(
    "rejected_params",
    "counter",
    "Requests refused for a parameter, by key, `unknown` for no key.",
    ("key",),
    common=False,
)
BUILD_INFO = Metric(
    "build_info",
    "gauge",
    "1; the labels say what draws here.",
    ("version", "noise_version", "backend", "runner", "vllm_version"),
)

CATALOGUE = (
    SAMPLED_TOKENS,
    REQUESTS,
    ANOMALOUS_TOKENS,
    WATCHED_TOKENS,
    EXPECTED_IMPROBABLE,
    TESTED_TOKENS,
    SURPRISAL,
    ENTROPY,
    SURPRISAL_VARIANCE,
    SCORE_PIT,
    SCORE_SQUARES,
    SCORE_STEP_SQUARES,
    SCORE_PAIRS,
    KEPT_TOKENS,
    TOKEN_RUN_LENGTH,
    SAMPLER_SECONDS,
    TOKEN_FREQUENCY_KL,
    FAULTS,
    TOP_N_GIVEN_UP,
    SHADOW_TOKENS,
    FALLBACKS,
    ROLLOUT_FRACTION,
    ROLLOUT_SHADOW,
    BREAKER_OPEN,
    REJECTED_PARAMS,
    BUILD_INFO,
)
