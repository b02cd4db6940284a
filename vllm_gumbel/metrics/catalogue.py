"""The one table of metrics: names, types, labels, help."""

from dataclasses import dataclass
from enum import StrEnum

PREFIX = "vllm_gumbel_"

#: Labels that every metric of a worker carries.
COMMON_LABELS = ("model_name", "engine", "arm")


class AnomalyKind(StrEnum):
    """Values of the label `kind` of `anomalous_tokens_total`."""

    NONFINITE_LOGITS = "nonfinite_logits"
    NO_CANDIDATE = "no_candidate"
    PADDED_ID = "padded_id"


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    Attributes:
        name: without prefix, and without `_total` for a counter.
        kind: "counter", "gauge" or "summary", which is shown as a sum and a count.
        help: one sentence.
        labels: names beyond those a metric carries anyway.
        common: whether it carries `COMMON_LABELS`.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    common: bool = True

    @property
    def exposed_name(self) -> str:
        """Name as it stands on `/metrics`."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    @property
    def label_names(self) -> tuple[str, ...]:
        """All labels, in order."""
        return (COMMON_LABELS if self.common else ()) + self.labels


SAMPLED_TOKENS = Metric("sampled_tokens", "counter", "Tokens drawn, without discarded draws of unfinished prompts.")
ANOMALOUS_TOKENS = Metric("anomalous_tokens", "counter", "Draws in which something was wrong, by kind.", ("kind",))
FAULTS = Metric("faults", "counter", "Errors inside the sampler's own bookkeeping; tokens kept flowing.", ("part",))
TOP_N_GIVEN_UP = Metric(
    "top_n_given_up_mass",
    "summary",
    "Share of a row's mass, at its temperature, that gumbel_top_n leaves out; one observation a token that sets it.",
)
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

CATALOGUE = (SAMPLED_TOKENS, ANOMALOUS_TOKENS, FAULTS, TOP_N_GIVEN_UP, REJECTED_PARAMS, BUILD_INFO)
