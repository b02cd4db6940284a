"""Compares what a server's `/metrics` counted during a fuzz with what its clients saw."""

from collections import Counter
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from scripts.fuzz_client import Answer
from scripts.fuzz_requests import LONGEST, Request
from vllm_gumbel.metrics.catalogue import GUMBEL, PREFIX, AnomalyKind
from vllm_gumbel.metrics.refusals import UNKNOWN
from vllm_gumbel.params import GumbelParams

#: What no request can bring about: the model's logits hold neither NaN nor infinity.
IMPOSSIBLE = (
    ("anomalous_tokens_total", AnomalyKind.NONFINITE_LOGITS),
    ("anomalous_tokens_total", GUMBEL, AnomalyKind.OUTSIDE_FILTER),  # vLLM's own keeps more than top_k among equals
    ("faults_total",),
    ("breaker_open",),
    ("fallbacks_total", "kernel"),
)
#: With asynchronous scheduling a text that ends by itself has a step more under way.
UNDER_WAY = 1
#: vLLM's own count.
PREEMPTIONS = ("vllm:num_preemptions_total",)
#: Series that may appear while requests come: kinds, arms and references that had not been seen.
NEW_SERIES = 60


@dataclass(frozen=True)
class Page:
    """What a server has counted.

    Attributes:
        values: sums of samples by name, by name and one label, and by name, arm and kind.
        keys: values of the label of refused keys.
        series: how many of ours there are.
    """

    values: Counter[tuple[str, ...]]
    keys: set[str]
    series: int

    @classmethod
    def of(cls, client: httpx.Client) -> "Page":
        """Read the page of a server."""
        values: Counter[tuple[str, ...]] = Counter()
        keys, series = set(), 0
        for family in text_string_to_metric_families(client.get("/metrics").text):
            for sample in family.samples:
                name = sample.name.removeprefix(PREFIX)
                values[name,] += sample.value
                for label in sample.labels.values():
                    values[name, label] += sample.value
                if "kind" in sample.labels:
                    values[name, sample.labels["arm"], sample.labels["kind"]] += sample.value
                series += sample.name.startswith(PREFIX)
                if name == "rejected_params_total":
                    keys.add(sample.labels["key"])
        return cls(values, keys, series)


def token_bounds(pairs: list[tuple[Request, Answer]]) -> tuple[int, int]:
    """Return between which numbers the tokens lie that were drawn for these requests."""
    least = most = 0
    for request, answer in pairs:
        if request.beams or '"use_beam_search"' in request.content:
            most += LONGEST if request.kind == "wild" else request.choices * (request.longest + 1)
            continue
        tokens = max(answer.tokens, answer.counted or 0)
        least += tokens
        if answer.left or (answer.status != 200 and tokens):
            most += request.choices * request.longest
        else:
            by_itself = sum(ending.startswith("stop") for ending in answer.endings.values())
            most += tokens + UNDER_WAY * by_itself
    return least, most


def refusals(pairs: list[tuple[Request, Answer]]) -> Counter[str]:
    """Return how many requests were refused by each key, as the metrics name it."""
    known = {*GumbelParams.model_fields, "seed"}
    return Counter(answer.key if answer.key in known else UNKNOWN for _, answer in pairs if answer.key)


def miscounted(before: Page, after: Page, pairs: list[tuple[Request, Answer]]) -> list[str]:
    """Return what the counters got wrong between two looks, in words."""
    found = []

    def grown(*name: str) -> int:
        return int(after.values[name] - before.values[name])

    least, most = token_bounds(pairs)
    drawn = grown("sampled_tokens_total")
    if not least <= drawn <= most:
        found.append(f"{drawn} tokens counted, between {least} and {most} were drawn")
    refused = refusals(pairs)
    for key in {*refused, *after.keys}:
        if (counted := grown("rejected_params_total", key)) != refused[key]:
            found.append(f"{counted} refusals by {key} counted, {refused[key]} came")
    for name in IMPOSSIBLE:
        if after.values[name]:
            found.append(f"{' '.join(name)} is {after.values[name]:g}")
    if unknown := after.keys - {*GumbelParams.model_fields, "seed", UNKNOWN}:
        found.append(f"clients made labels: {sorted(unknown)[:5]}")
    if after.series > before.series + NEW_SERIES:
        found.append(f"{before.series} series became {after.series}")
    return found
