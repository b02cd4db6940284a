"""Small inputs of every kind that a report takes, and a reader that refuses HTML whose tags do not close."""

import copy
from html.parser import HTMLParser
from typing import Any

from tests.metrics_page import Page
from tests.test_check import EXACT, STOCK, page_of
from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import AnomalyKind

VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


def measure(name: str, title: str, kind: str, **known: Any) -> dict[str, Any]:
    """Return one measure, with null for what is not given."""
    keys = ("baseline", "candidate", "value", "independent_value", "difference", "low", "high")
    reductions = ("variance_reduction", "variance_reduction_low", "variance_reduction_high")
    nothing = dict.fromkeys((*keys, "better", "independent_low", "independent_high", *reductions))
    return {"name": name, "title": title, "kind": kind, "level": 0.95, "texts": 159, **nothing, **known}


QUANTILES = [0.05, 0.25, 0.5, 0.75, 0.95]
MEASURES = [
    measure(
        "mean_logprob",
        "Mean log-probability a token, nats",
        "quality",
        baseline=-1.912,
        candidate=-1.991,
        difference=-0.079,
        low=-0.109,
        high=-0.051,
        variance_reduction=2.6,
        variance_reduction_low=1.9,
        variance_reduction_high=3.4,
    ),
    measure(
        "distinct_2",
        "Distinct pairs of tokens, share",
        "quality",
        better="higher",
        baseline=0.871,
        candidate=0.858,
        difference=-0.013,
        low=-0.022,
        high=-0.004,
        variance_reduction=1.7,
        variance_reduction_low=1.3,
        variance_reduction_high=2.2,
    ),
    measure(
        "loop_rate",
        "Texts that ever loop",
        "quality",
        better="lower",
        baseline=0.04,
        candidate=0.06,
        difference=0.02,
        low=-0.01,
        high=0.05,
        variance_reduction=1.3,
        variance_reduction_low=0.9,
        variance_reduction_high=1.9,
    ),
    measure(
        "length",
        "Length, tokens",
        "quality",
        baseline=201.2,
        candidate=207.9,
        difference=6.7,
        low=-4.0,
        high=18.1,
    ),
    measure("bleu", "BLEU between the sides", "divergence", value=41.0, independent_value=5.2, low=35.0, high=48.0),
    measure(
        "rouge_l", "ROUGE-L between the sides", "divergence", value=0.55, independent_value=0.17, low=0.49, high=0.61
    ),
    measure(
        "seconds",
        "Time to the last token, s",
        "speed",
        better="lower",
        baseline=3.1,
        candidate=2.9,
        difference=-0.2,
        low=-0.3,
        high=-0.1,
    ),
]
CURVE = [(1, 0.98), (2, 0.95), (4, 0.86), (8, 0.66), (16, 0.45), (32, 0.25), (64, 0.12), (128, 0.08), (256, 0.06)]
STORY = (
    "The old railway station had not seen a train for eleven years, and yet the clock above the platform was always "
    "right. Nobody in the village wound it."
)

_COMPARISON: dict[str, Any] = {
    "kind": "comparison",
    "version": 1,
    "created": "2026-11-30T05:00:00Z",
    "question": {"temperature": 1.0, "top_p": 0.95, "max_tokens": 256, "chat": False, "tasks": ["chat", "facts"]},
    "baseline": {"model": "models/smollm2", "url": None, "name": "smollm2", "sampler": "gumbel", "noise_version": 1},
    "candidate": {
        "model": None,
        "url": "http://127.0.0.1:8001",
        "name": "smollm2 in 4 bits",
        "sampler": "gumbel",
        "noise_version": 1,
    },
    "coupled": True,
    "coupling": "both sides draw with the same noise, the same seeds and a salt for each prompt",
    "same_machine": True,
    "prompts": 40,
    "seeds": 4,
    "pairs": 159,
    "asked": 160,
    "unit": "token",
    "failed": {"baseline": 0, "candidate": 1},
    "failures": {"baseline": [], "candidate": [["chat-03/2", "400 Bad Request: the context is 1024 tokens"]]},
    "measures": MEASURES,
    "agreement": {
        "tokens": 2903,
        "agree": 2744,
        "share": 0.945,
        "low": 0.93,
        "high": 0.96,
        "median_divergence": 14,
        "curve": [[at, share, max(share - 0.06, 0.0), min(share + 0.05, 1.0)] for at, share in CURVE],
    },
    "by_task": {"chat": MEASURES[:3], "facts": []},
    "tokens_for_interval": {"coupled": 12000, "independent": 31200, "half_width": 0.029, "measure": "mean_logprob"},
    "token_frequencies": {
        "unit": "token id",
        "tokens": [
            [100 + 7 * i, 0.05 / (i + 1), 0.05 / (i + 1) * (1 + 0.6 * ((i * 37) % 11 - 5) / 8)] for i in range(120)
        ]
        + [[3303, 0.0001, 0.0], ["<script>alert(1)</script>", 0.0, 0.0002]],
    },
    "lengths": {"quantiles": QUANTILES, "baseline": [12, 90, 256, 256, 256], "candidate": [14, 95, 256, 256, 256]},
    "latency": {
        "quantiles": QUANTILES,
        "baseline": [0.5, 1.4, 3.1, 3.2, 3.6],
        "candidate": [0.5, 1.3, 2.9, 3.0, 3.4],
        "first_token": {"baseline": [0.02, 0.03, 0.04, 0.08, 0.2], "candidate": [0.02, 0.03, 0.05, 0.09, 0.22]},
    },
    "notes": ["coherence is blind to the order of words"],
    "redacted": False,
    "examples": [
        {
            "id": "story-1/0",
            "task": "story",
            "prompt": "Write about an old railway station.",
            "diverges_at": 31,
            "baseline": f"{STORY} It was said that the last stationmaster still came at night, with a lamp.",
            "candidate": f"{STORY} They had tried to stop it once, with a hammer, and the hammer was late ever since.",
        },
        {
            "id": "chat-4/1",
            "task": "chat",
            "prompt": [{"role": "user", "content": "What is tea made of?"}],
            "baseline": "Leaves and water.",
            "candidate": "Leaves and hot water.",
            "diverges_at": 2,
        },
    ],
}


def comparison(**changes: Any) -> dict[str, Any]:
    """Return `comparison.json` of a candidate with rounded weights."""
    return copy.deepcopy(_COMPARISON) | changes


def verified(i: int, verdict: str, **changes: Any) -> dict[str, Any]:
    """Return one verified record of 40 tokens; of one that differs every sixth does not match."""
    wrong = verdict == "differs"
    positions = []
    for p in range(40):
        match = not (wrong and p % 6 == 5)
        margin = ((p * 29 + i * 7) % 40) / 10 + 0.05
        positions.append(
            {
                "token": 500 + p,
                "text": f" word{p}",
                "match": match,
                "margin": margin if match else -margin / 3,
                "rank": 1 if match else 3,
                "probability": 0.4,
                "kept": True,
            }
        )
    record = {
        "id": f"chat-{i}/0",
        "verdict": verdict,
        "explanation": "another seed" if wrong else None,
        "tokens": 40,
        "matched": sum(each["match"] for each in positions),
        "notes": [],
        "evidence_against": 9.5 + i if wrong else -1.2 - i / 9,
        "evidence_for": -4.0 if wrong else 12.5 + i,
        "decided_at": 17 if wrong else 6,
        "positions": positions,
    }
    return record | changes


def verification(**changes: Any) -> dict[str, Any]:
    """Return what `verify --json` writes for records of every verdict."""
    records = [verified(i, "differs" if i % 5 == 4 else "matches") for i in range(20)]
    nothing = {"tokens": 0, "matched": 0, "positions": [], "evidence_against": None, "evidence_for": None}
    records.append(verified(20, "undecided", decided_at=None, notes=["greedy: the tokens say nothing about a seed"]))
    records.append(verified(21, "unreadable", **nothing, decided_at=None, explanation="the request had no seed"))
    tokens, matched = (sum(record[key] for record in records) for key in ("tokens", "matched"))
    totals = {"tokens": tokens, "matched": matched, "summary": "an honest file has so many with a chance of 0.3%"}
    head = {"kind": "verification", "version": 1, "created": "2026-11-30T05:00:00Z", "model": "SmolLM2"}
    precision = {"precision": "float32", "server_precision": "bfloat16", "alpha": 0.001}
    return {**head, **precision, "records": records, "totals": totals} | changes


def gate(name: str, outcome: str, **changes: Any) -> dict[str, Any]:
    """Return what one gate says."""
    says = {"says": "3 of 24,000 tokens; default 2 of 216,000", "p_value": 0.21, "rate": 7.1e-06, "finds": 0.0011}
    return {"gate": name, "outcome": outcome} | says | changes


def look(stage: str, number: int, outcome: str, at: float) -> dict[str, Any]:
    """Return one look at a stage."""
    results = [
        gate("gumbel improbable", "pass", p_value=0.4),
        gate("gumbel repetition", "fail" if outcome == "fail" else "pass", p_value=2e-9 if outcome == "fail" else 0.02),
        gate("gumbel exactness", "unknown" if outcome == "unknown" else "pass", p_value=None, rate=None, finds=None),
        gate("first_token", "pass", p_value=None, rate=None, finds=None, says="mean 0.020 s, 1.02 of the baseline's"),
        gate("throughput", "shown", p_value=None, rate=None, finds=None, says="480 tokens/s"),
    ]
    return {"stage": stage, "look": number, "outcome": outcome, "began": at, "ended": at + 600, "results": results}


def rollout(**changes: Any) -> dict[str, Any]:
    """Return what `rollout run --json` writes for a run whose last stage fails."""
    stages = ["baseline", "0% with shadow", "1%", "5%", "25%", "50%"]
    looks = [look(stage, 1, "pass", 1.7959e9 + 700 * i) for i, stage in enumerate(stages)]
    looks[3:3] = [look("5%", 1, "unknown", 1.7959e9), look("5%", 2, "unknown", 1.7959e9)]
    looks.append(look("100%", 1, "fail", 1.7959e9 + 6000))
    settings = {
        "server": "http://127.0.0.1:8000",
        "prometheus": "http://127.0.0.1:9090",
        "stages": "0:shadow,1,5,25,50",
    }
    return {
        **settings,
        "hold_seconds": 600.0,
        "alpha": 0.001,
        "set_back_seconds": 0.24,
        "exit_code": 1,
        "looks": looks,
    } | changes


def study(**changes: Any) -> dict[str, Any]:
    """Return what `scripts/study_knobs.py` writes."""
    settings = {
        name: {
            "kl_nats": kl,
            "entropy_nats": 2.9 - kl,
            "kept_ids": ids,
            "kept_mass": 0.99,
            "best": 0.4,
            "mean_logprob": -2.8 + kl,
            "distinct_1": 0.61,
            "distinct_2": 0.93,
            "distinct_3": 0.98,
            "loop_rate": loops,
            "loop_share": loops / 3,
            "tokens_per_second": 480.0 * ratio,
            "throughput_ratio": ratio,
            "stock_ratio": 1.2 * ratio,
        }
        for name, kl, ids, loops, ratio in (
            ("plain, temperature 1", 0.0, 49152.0, 0.012, 1.0),
            ("top_n 20", 0.41, 20.0, 0.054, 0.99),
            ("tail boost 0.25", 0.22, 49152.0, 0.004, 0.97),
            ("noise scale 0.5", 0.87, 49152.0, 0.31, 1.01),
            ("greedy, repetition offset 10", 1.92, 1.0, 0.017, 0.95),
            ("greedy", 2.31, 1.0, 0.83, 1.04),
        )
    }
    sizes = {"prompts": 240, "rows": 240, "tokens": 128, "rounds": 5, "batch": 32, "batch_tokens": 32}
    return {**sizes, "settings": settings} | changes


def server_page() -> Page:
    """Return the metrics of a server with two arms and something in everything that is drawn."""
    page = page_of(EXACT)
    page.add(STOCK, drawn=160_000, arm="default")
    page.child(catalogue.REQUESTS).inc(300)
    page.child(catalogue.ANOMALOUS_TOKENS, kind=AnomalyKind.REPETITION).inc(8)
    page.child(catalogue.TOKEN_FREQUENCY_KL, reference="default").set(0.01234)
    page.child(catalogue.ROLLOUT_FRACTION).set(0.25)
    for i in range(60):
        for arm in ("gumbel", "default"):
            page.child(catalogue.KEPT_TOKENS, arm).observe(3 * i * i + (arm == "default") * 40)
        page.child(catalogue.TOKEN_RUN_LENGTH).observe(1 + (i % 7 == 0) + 8 * (i == 30))
        page.child(catalogue.SAMPLER_SECONDS).observe(0.0004 + i / 9000)
    return page


class Reader(HTMLParser):
    """Reads a page, and fails if a tag does not close where it must.

    Attributes:
        tags: every element, as name and attributes.
        text: everything that is read as text, styles apart.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note an element, and that it is open."""
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note an element that closes itself, which only those of SVG do."""
        assert "svg" in self._open or tag in VOID, tag
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost element, which must be this one."""
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag, f"</{tag}> crosses another"

    def handle_data(self, data: str) -> None:
        """Keep a text."""
        if self._open[-1:] != ["style"]:
            self.text += data
