"""Whether a text was drawn as claimed: what its tokens say for and against, as betting scores with error rates.

**The claim.** With the noise known, the claim names one token for each position, the winner of a race. A verifier with
the same weights and another kernel, batch or precision gets slightly other logits, so that close races come out
otherwise: comparing margins of scores that contain the noise, rather than counting equal tokens, is the idea of
Token-DiFR (post-Gumbel margins). Here the disagreement is a second, small race (`likelihood_row.py`): the claim gives
every id the probability P0 = (1 - eps) race(beta0) + eps (anything), beta0 from a tolerance that was measured on honest
texts.

**Against it.** For a set of other laws P_k, fixed before the text is looked at, each again a probability of every
token given those before it:

    Lambda_n = sum over k of w_k prod_{i <= n} P_k(token i) / prod_{i <= n} P0(token i),    sum of w_k = 1

If the tokens follow P0 this is a test martingale with start 1, and Ville's inequality gives
P(Lambda_n >= 1/alpha for any n) <= alpha (Ville 1939; Shafer 2021, "Testing by betting"; Ramdas, Grunwald, Vovk, Shafer
2023, "Game-theoretic statistics and safe anytime-valid inference", section 2). So it may be looked at after every token
and the text may end at any. It holds as far as P0 describes how server and verifier differ, which no theorem says: the
rate of false alarms is measured by `scripts/study_verification.py` and printed in the README.

**For it.** E_n = prod P0 / prod P_other, where P_other is the law of a token whose noise is not known: the tempered,
filtered softmax. A text that the same model drew with another seed reaches 1/alpha with a chance of alpha at most, by
the same inequality. A greedy text says nothing about a seed; P_other is then the model's own law at temperature 1.

**Verdict.** `differs` if Lambda reached 1/alpha, else `matches` if E ends at 1/alpha or more, else `undecided`. Both
are about one text. Of several texts `of_many` multiplies the ratios, law by law: the same martingale, the texts one
after another. It finds what no single text shows, 8-bit weights say, and a tolerance that is too small as well, so it
is reported beside the verdicts and changes none.

**Why.** The law with the highest likelihood, in words. It is the best of those that were tried and no more: other
weights, another prompt and another adapter look alike.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from vllm_gumbel.evaluate.likelihood_row import Law
from vllm_gumbel.evaluate.replayed import Claim
from vllm_gumbel.rollout.exact import binomial_tail

Values = npt.NDArray[np.float64]

#: Size of the difference between the logits of server and verifier, by the coarser precision of the two. Measured on
#: SmolLM2-135M, vLLM against transformers (`vllm-gumbel verify --calibrate`): the value of greatest likelihood.
TOLERANCES = {"float32": 0.0005, "float16": 0.01, "bfloat16": 0.045}

#: Share of tokens that a claim leaves to chance: an edited word has to stand out. In 5,760 honest tokens of SmolLM2 the
#: least likely one had a race of exp(-5.8).
EPS = 1e-7

#: Share of tokens whose logits may differ by three times the tolerance.
LOOSE = 0.03

MATCHES, DIFFERS, UNDECIDED, UNREADABLE = "matches", "differs", "undecided", "unreadable"

_TEMPERATURES = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 1.8)
_TOP_PS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)
_TOP_KS = (0, 10, 20, 50, 100)
_MIN_PS = (0.0, 0.02, 0.05, 0.1)
#: Disagreements of another model, as multiples of the tolerance, up to the largest, in logits.
_COARSER, _COARSEST = (1.5, 3, 6, 12, 30, 100, 300, 1000, 3000), 3.0
_EDITED = (0.01, 0.05, 0.3)


#: Family, name and share of strange tokens: what a law is called in every text.
Key = tuple[str, str, float]


@dataclass(frozen=True)
class Better:
    """A law that may explain a text.

    Attributes:
        family: what kind of deviation.
        name: in words.
        log10_times_better: its likelihood over the claim's.
    """

    family: str
    name: str
    log10_times_better: float


@dataclass(frozen=True)
class Judgement:
    """What a text's tokens say about its claim.

    Attributes:
        verdict: `matches`, `differs` or `undecided`.
        explanation: why, in words.
        evidence_against: log10 of the largest Lambda.
        evidence_for: log10 of the last E.
        decided_at: index of the token after which the verdict was certain; None if it is not.
        alternatives: the best law of every family, best first.
        ratios: law -> ln of its likelihood over the claim's.
    """

    verdict: str
    explanation: str
    evidence_against: float
    evidence_for: float
    decided_at: int | None
    alternatives: tuple[Better, ...]
    ratios: Mapping[Key, float] = field(default_factory=dict)


def laws(claim: Claim, tolerance: float) -> list[Law]:
    """Return the claimed law and, after it, all others; the second is that of a token whose noise is not known."""
    claimed = Law("claim", "", claim.temperature, claim.top_k, claim.top_p, claim.min_p, tolerance, EPS, True, LOOSE)
    if claim.is_greedy:
        claimed = replace(claimed, noisy=False)
        blind = replace(claimed, family="temperature", name="temperature 1", temperature=1.0, loose=0.0)
    else:
        blind = replace(claimed, family="seed", name="another seed", noisy=False, loose=0.0)
    strict = replace(claimed, loose=0.0)
    others = [*_temperatures(strict), *_filters(strict), *_weights(strict)]
    others += [replace(claimed, family="edit", name="an edited text", strange=share) for share in _EDITED]
    return [claimed, blind, *(law for law in others if law != blind)]


def judge(chances: Values, tried: Sequence[Law], alpha: float) -> Judgement:
    """Return the verdict on one text.

    Args:
        chances: float64 [tokens, laws], in (0, 1].
        tried: the laws, of `laws`.
        alpha: chance of each error.
    """
    if not len(chances):
        return Judgement(UNDECIDED, "the text has no tokens", 0.0, 0.0, None, ())
    along = np.cumsum(np.log(np.maximum(chances, 1e-300)), axis=0)
    against = np.logaddexp.reduce(along[:, 1:] - along[:, :1] + np.log(_weights_of(tried[1:])), axis=-1)
    favour = along[:, 0] - along[:, 1]
    limit = -math.log(alpha)
    better = _best_of_families(along[-1], tried)
    numbers = (float(against.max()) / math.log(10), float(favour[-1]) / math.log(10))
    at: int | None = None
    if against.max() >= limit:
        verdict, words = DIFFERS, _why_not(better, chances, tried)
        at = int(np.argmax(against >= limit))
    elif favour[-1] >= limit:
        verdict, words = MATCHES, _why(tried[0])
        at = int(np.argmax(favour >= limit))
    else:
        verdict, words = (
            UNDECIDED,
            f"its {len(chances)} tokens say too little: evidence for the claim 10^{numbers[1]:.1f}",
        )
        words += f", against it 10^{numbers[0]:.1f}, either needs 10^{limit / math.log(10):.1f}"
    ratios = {_key(law): float(total - along[-1, 0]) for law, total in zip(tried[1:], along[-1, 1:], strict=True)}
    return Judgement(verdict, words, *numbers, at, better, ratios)


@dataclass(frozen=True)
class Totals:
    """What many texts say together.

    Attributes:
        judged: texts with a verdict.
        differ: how many differ.
        expected: false alarms that alpha allows for on average.
        chance: of that many false alarms or more if every text were honest.
        verdict: on all texts as one.
        explanation: of it, in words.
        evidence_against: log10 of Lambda of all texts as one.
        evidence_for: log10 of their E.
    """

    judged: int
    differ: int
    expected: float
    chance: float
    verdict: str
    explanation: str
    evidence_against: float
    evidence_for: float


def of_many(judgements: Iterable[Judgement], alpha: float) -> Totals:
    """Return what several texts say together; a law that was not tried for a text says nothing about it."""
    texts = list(judgements)
    judged, differ = len(texts), sum(each.verdict == DIFFERS for each in texts)
    ratios: dict[Key, float] = {}
    against = 0.0
    for text in texts:
        for key, ratio in text.ratios.items():
            ratios[key] = ratios.get(key, 0.0) + ratio
        if ratios:
            against = max(
                against, float(np.logaddexp.reduce(np.array(list(ratios.values())) + np.log(shares(list(ratios)))))
            )
    favour = sum(text.evidence_for for text in texts)
    verdict = UNDECIDED
    words = "together the texts say too little"
    if against >= -math.log(alpha):
        best = max(ratios, key=lambda key: ratios[key])
        verdict, words = DIFFERS, f"{best[1]} explains them 10^{ratios[best] / math.log(10):.0f} times better"
    elif favour >= -math.log10(alpha):
        verdict, words = MATCHES, "together the texts are the claim's"
    chance = binomial_tail(differ, judged, alpha)
    return Totals(judged, differ, judged * alpha, chance, verdict, words, against / math.log(10), favour)


def _temperatures(claimed: Law) -> list[Law]:
    """Return laws of other temperatures; without the noise where the claim has none."""
    found = []
    for temperature in _TEMPERATURES:
        if abs(temperature - claimed.temperature) > 0.02:
            name = f"temperature {temperature:g}"
            noisy = temperature > 0 and claimed.noisy
            found.append(replace(claimed, family="temperature", name=name, temperature=temperature, noisy=noisy))
    return found


def _filters(claimed: Law) -> list[Law]:
    """Return laws in which one filter is another, one that is off included."""
    if claimed.is_greedy:
        return []
    found = []
    for top_p in _TOP_PS:
        if abs(top_p - claimed.top_p) > 0.005:
            found.append(replace(claimed, family="filter", name=_filter("top_p", top_p, 1), top_p=top_p))
    for top_k in _TOP_KS:
        if top_k != claimed.top_k:
            found.append(replace(claimed, family="filter", name=_filter("top_k", top_k, 0), top_k=top_k))
    for min_p in _MIN_PS:
        if abs(min_p - claimed.min_p) > 0.002:
            found.append(replace(claimed, family="filter", name=_filter("min_p", min_p, 0), min_p=min_p))
    return found


def _weights(claimed: Law) -> list[Law]:
    """Return laws of a coarser disagreement."""
    sizes = [claimed.tolerance * times for times in _COARSER if claimed.tolerance * times <= _COARSEST]
    sizes = sizes or [3 * claimed.tolerance]
    name = "another model, other weights or another prompt (logits that differ by about {:.2g})"
    return [replace(claimed, family="weights", name=name.format(size), tolerance=size) for size in sizes]


def _filter(name: str, value: float, off: float) -> str:
    return f"no {name}" if value == off else f"{name} {value:g}"


def _key(law: Law) -> Key:
    return law.family, law.name, law.strange


def _weights_of(tried: Sequence[Law]) -> Values:
    return shares([_key(law) for law in tried])


def shares(keys: Sequence[Key]) -> Values:
    """Return the w_k: equal for every family, and equal within it."""
    families = [family for family, *_ in keys]
    return np.array([1 / families.count(family) / len(set(families)) for family in families])


def _best_of_families(totals: Values, tried: Sequence[Law]) -> tuple[Better, ...]:
    best: dict[str, Better] = {}
    for law, total in zip(tried[1:], totals[1:], strict=True):
        times = float(total - totals[0]) / math.log(10)
        if law.family not in best or times > best[law.family].log10_times_better:
            best[law.family] = Better(law.family, law.name, times)
    return tuple(sorted(best.values(), key=lambda each: -each.log10_times_better))


def _why(claimed: Law) -> str:
    if claimed.is_greedy:
        return "the tokens are the model's best; being greedy, they say nothing about a seed"
    return "the tokens are those of the claimed seed and parameters"


def _why_not(found: Sequence[Better], chances: Values, tried: Sequence[Law]) -> str:
    best = found[0]
    times = f"10^{best.log10_times_better:.0f} times better than the claim"
    name = best.name
    if best.family == "edit":
        name = f"text edited near token {_edited_at(chances, tried)}"
    elif best.family == "temperature":
        claimed = f"the claimed {tried[0].temperature:g}" if not tried[0].is_greedy else "the claimed greedy choice"
        times = times.replace("the claim", claimed)
        name = name if best.name != "temperature 0" else "greedy choice"
    elif best.family == "filter":
        which = best.name.split()[0 if not best.name.startswith("no ") else 1]
        value = getattr(tried[0], which)
        off = value == (1 if which == "top_p" else 0)
        times = times.replace("the claim", "the claim that there was none" if off else f"the claimed {value:g}")
    words = f"{name} explains it {times}"
    close = [each.name for each in found[1:] if best.log10_times_better - each.log10_times_better < 1]
    return f"{words}; about as good: {', '.join(close)}" if close else words


def _edited_at(chances: Values, tried: Sequence[Law]) -> int:
    """Return the first token that is rather anything than the winner of the race; the strangest if there is none."""
    place = next(i for i, law in enumerate(tried) if law.family == "edit")
    gain = np.log(chances[:, place]) - np.log(chances[:, 0])
    strange = np.flatnonzero(gain > math.log(tried[place].strange / EPS / 2))
    return int(strange[0]) if len(strange) else int(np.argmax(gain))
