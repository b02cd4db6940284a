"""The chance of one token under a law of how it was drawn, the noise being known.

Every law has one form. With x the tempered logits, K the ids that its filters keep, G the noise and s its scale,

    race(c)  = exp(score[c] / beta) / sum over K of exp(score / beta),    score = x + s G,    beta = tolerance / T
    P(c)     = (1 - strange) race(c) + strange (softmax(x)[c] / 2 + 1 / (2 V))

beta is the size of what server and verifier disagree about, in tempered logits: a race run once more, with a little
Gumbel noise of its own. As beta goes to 0 the token is the winner of the race and nothing else. A law without noise has
score = x and s in the place of beta, which is the chance of a token when the noise is not known.

A few tokens may have 3 beta, for outliers. The disagreement moves the edge of K as well: a fifth of race(c) is spread
over edges up to 8 beta away, in logits or in the odds of the mass that top_p keeps, whichever moves the edge more.

Kept sets are beginnings of a ranking, so a filter is a length. Only a part of the vocabulary is looked at: the `HEAD`
best ids and the ids whose noise is large. No other id can win, which is checked; where it fails, and where a filter
keeps more, the whole vocabulary is ranked. Laws other than the claimed one are laws on that part, with the mass of the
rest, where top_p asks for it, estimated from every 16th id: whatever they are, they are probabilities, or less, that
were fixed before the token was looked at, and that is all that `likelihood.py` needs of them.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vllm_gumbel.evaluate.replayed import LUCKY_NOISE, Claim
from vllm_gumbel.kernels.contract import GREEDY_TEMPERATURE
from vllm_gumbel.kernels.sample_reference import scale

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

#: Best ids of a row that are always looked at.
HEAD = 2048
#: The rest is estimated from every so many-th id.
_STEP = 16
#: Scores this many betas below the best one do not matter: exp(-16) is 1e-7.
_REACH = 16
#: How much larger the tolerance of outliers is.
_LOOSER = 3
#: Shares of race(c) at shifted edges: (edge in betas, share).
_EDGES = tuple((edge, 0.2 / 6) for edge in (-8.0, -4.0, -2.0, 2.0, 4.0, 8.0))


@dataclass(frozen=True)
class Law:
    """One way in which the tokens may have been drawn.

    Attributes:
        family: what kind of deviation from the claim; `claim` for none.
        name: in words.
        temperature, top_k, top_p, min_p: as in `Claim`.
        tolerance: size of the difference between server's and verifier's logits.
        strange: share of tokens that come from somewhere else.
        noisy: whether the claimed noise drew them.
        loose: share of tokens whose tolerance is three times as large: honest logits have outliers.
    """

    family: str
    name: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    tolerance: float
    strange: float
    noisy: bool
    loose: float = 0.0

    @property
    def is_greedy(self) -> bool:
        """Whether the best id is taken, and filters play no part."""
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True)
class Look:
    """What one token looks like under the claim.

    Attributes:
        match: whether it is the one that the claim draws.
        margin: its score less the best other one; None where the draw has no scores.
        rank: 1 for the winner; among the ids that were looked at.
        probability: its chance when the noise is not known.
        kept: whether the filters keep it.
    """

    match: bool
    margin: float | None
    rank: int
    probability: float
    kept: bool


@dataclass(frozen=True)
class _Tempered:
    """The looked-at ids at one temperature.

    Attributes:
        x: tempered logits, in ranking order, then the extras.
        score: of the same ids.
        mass: of the beginnings of the ranking, in units of the best id's.
    """

    x: Values
    score: Values
    mass: Values


class TokenRow:
    """One row of logits, edited, with the token that is said to have been drawn from it.

    Args:
        logits: float32 [vocab], of `replayed.edited`.
        claim: how it was drawn.
        law: the claimed law.
        position: index, in the sequence, of the last token before the draw.
        token: that came.
        generated: tokens of the text before it.
    """

    def __init__(self, logits: Row, claim: Claim, law: Law, position: int, token: int, generated: int) -> None:
        self._logits, self._claim, self._position, self._token = logits, claim, position, token
        self._vocab = len(logits)
        self._hybrid = claim.is_hybrid(generated) and not law.is_greedy
        self._x = logits if law.is_greedy else scale(logits, np.float32(law.temperature))
        self._claimed = law
        self._count = int(np.count_nonzero(self._x > -np.inf))
        self.is_drawable = bool(self._count and self._x.max() < np.inf)
        if self.is_drawable and not self._look_at(HEAD):
            self._look_at(self._vocab)

    def chance(self, law: Law) -> float:
        """Return P(token), in (0, 1]."""
        if not self.is_drawable:
            return 1 / self._vocab
        race = self._race(law)
        if law.loose:
            looser = replace(law, tolerance=_LOOSER * law.tolerance)
            race = (1 - law.loose) * race + law.loose * self._race(looser)
        return (1 - law.strange) * race + law.strange * self._anything

    def look(self) -> Look:
        """Return what the token looks like under the claimed law."""
        if not self.is_drawable:
            return Look(False, None, self._vocab, 0.0, False)
        law = self._claimed
        length = self._length(law)
        kept = self._rank < length
        probability = self._softmax(self._tempered(law), length, 1.0 if law.is_greedy else self._claim.noise_scale)
        if self._hybrid:
            match = kept and self._inverse(law, self._tempered(law), length, 0.0) > 0
            return Look(match, None, 1 if match else 2, probability, kept)
        scores = self._tempered(law).score
        others = scores.copy()
        others[self._place] = -np.inf
        others[self._ranks >= length] = -np.inf
        mine, best = scores[self._place], others.max()
        ahead = (others > mine) | ((others == mine) & (self._ids < self._token) & (others > -np.inf))
        rank = 1 + int(ahead.sum())
        return Look(bool(kept and rank == 1), float(mine - best), rank, probability, bool(kept))

    def _look_at(self, head: int) -> bool:
        """Choose the ids to look at; return whether they are enough for the claimed law."""
        x = self._x
        lowest = -np.inf if head >= self._count else np.partition(x, self._vocab - head)[self._vocab - head]
        ranked = np.flatnonzero(x >= lowest) if lowest > -np.inf else np.flatnonzero(x > -np.inf)
        if len(ranked) == self._count - 1:  # so that a length behind the head is never the whole
            ranked = np.flatnonzero(x > -np.inf)
        ranked = ranked[np.argsort(-x[ranked], kind="stable")]
        self._head, self._is_whole = len(ranked), len(ranked) == self._count
        self._largest = float(x[ranked[0]])
        extras = np.zeros(0, np.int64)
        if not self._is_whole:
            sample = self._logits[::_STEP]
            self._sample = sample[sample < self._logits[ranked[-1]]].astype(np.float64)
            if not self._claimed.is_greedy:
                extras = self._claim.lucky(self._position, np.arange(self._vocab))
                extras = extras[(x[extras] < lowest) & (x[extras] > -np.inf)]
        self._is_unseen = self._token not in ranked and self._token not in extras
        if self._is_unseen and x[self._token] > -np.inf:
            extras = np.append(extras, self._token)  # to be shown; only exact chances count it
        self._ids = np.concatenate([ranked, extras])
        found = np.flatnonzero(self._ids == self._token)
        self._place = int(found[0]) if len(found) else -1
        self._ranks = np.where(np.arange(len(self._ids)) < self._head, np.arange(len(self._ids)), self._count - 1)
        self._rank = int(self._ranks[self._place]) if self._place >= 0 else self._vocab
        noisy = not self._claimed.is_greedy
        self._noise = self._claim.noise(self._position, self._ids) if noisy else None
        self._at: dict[float, _Tempered] = {}
        mass = np.exp(x[ranked].astype(np.float64) - self._largest).sum()
        if not self._is_whole:
            narrow = np.exp(x - np.float32(self._largest))
            mass += max(0.0, float(narrow.sum(dtype=np.float64) - narrow[ranked].sum(dtype=np.float64)))
        self._total = float(mass)
        share = np.exp(float(x[self._token]) - self._largest) / self._total
        self._anything = 0.5 * float(share) + 0.5 / self._vocab
        return self._is_whole or (not self._hybrid and self._suffices())

    def _suffices(self) -> bool:
        """Whether no id that is not looked at matters to the claimed law."""
        law = self._claimed
        length = self._length(law)
        if length <= self._head:
            return True
        if length < self._count or law.is_greedy:
            return law.is_greedy  # the best id is in the head
        beta = law.tolerance / law.temperature
        unseen = float(self._x[self._ids[self._head - 1]]) + self._claim.noise_scale * LUCKY_NOISE
        return bool(self._tempered(law).score.max() - unseen > _REACH * beta)

    def _tempered(self, law: Law) -> _Tempered:
        if law.temperature not in self._at:
            values = self._logits[self._ids]
            narrow = values if law.is_greedy else scale(values, np.float32(law.temperature))
            x = narrow.astype(np.float64)
            score = x if law.is_greedy or self._noise is None else self._claim.scored(narrow, self._noise)
            mass = np.cumsum(np.exp(x[: self._head] - x[0]))
            self._at[law.temperature] = _Tempered(x, score, mass)
        return self._at[law.temperature]

    def _length(self, law: Law, shift: float = 0.0) -> int:
        """Return how many ids of the ranking the filters keep; of a beginning behind the head only that it is there.

        Args:
            law: with the filters.
            shift: by how much the logits of ids at the edge, and of all behind it, lie above what they seem.
        """
        length = self._count
        if law.is_greedy:
            return length
        at = self._tempered(law)
        x = at.x[: self._head]
        if law.min_p > 0:
            within = max(1, _at_least(x, x[0] + np.log(np.float64(np.float32(law.min_p))) - shift))
            length = min(length, within if within < self._head else self._behind)
        if 0 < law.top_k < self._vocab:
            length = min(length, law.top_k)
        if self._head < length < self._count:  # so that the mass of what is left is not known either
            return self._behind
        if law.top_p < 1:
            top_p = np.float64(np.float32(law.top_p))
            if shift:
                top_p = 1 / (1 + (1 / top_p - 1) * np.exp(-shift))
            mass = at.mass[:length]
            total = mass[-1] if length <= self._head else mass[-1] + self._rest(law, x)
            within = int(np.searchsorted(mass, top_p * total, side="left"))
            if within < len(mass):
                length = min(length, within + 1)
            elif length > self._head:
                length = self._behind
        return length

    @property
    def _behind(self) -> int:
        """Return the length of a beginning that ends behind the head, which no exact length is; the whole otherwise."""
        return self._count if self._is_whole else self._head + 1

    def _shifted(self, law: Law, length: int, shift: float) -> int:
        """Return the length of a kept set whose edge lies elsewhere: by value or by mass, whichever moves it more."""
        x = self._tempered(law).x[: self._head]
        by_value = _at_least(x, x[min(length, self._head) - 1] - shift)
        by_mass = self._length(law, shift)
        return max(by_value, by_mass) if shift > 0 else max(1, min(by_value, by_mass))

    def _rest(self, law: Law, x: Values) -> float:
        """Return the mass of the ids behind the head, in units of the best one's."""
        if self._is_whole:
            return 0.0
        if law.temperature == self._claimed.temperature:
            return max(0.0, self._total - float(self._tempered(law).mass[-1]))
        return float(_STEP * np.exp(self._sample / law.temperature - x[0]).sum())

    def _race(self, law: Law) -> float:
        if self._place < 0:
            return 0.0
        at, length = self._tempered(law), self._length(law)
        greedy = law.is_greedy
        is_claimed = law.temperature == self._claimed.temperature
        if not law.noisy and not greedy and is_claimed and length >= self._count and self._claim.noise_scale == 1:
            return float(np.exp(at.x[self._place] - self._largest) / self._total)
        if self._is_unseen:
            return 0.0
        beta = law.tolerance if greedy else law.tolerance / law.temperature
        if not law.noisy:
            sharpness = law.tolerance if greedy else self._claim.noise_scale
            values = at.x
        elif self._hybrid and not greedy:
            return self._inverse(law, at, length, beta)
        else:
            sharpness, values = beta, at.score
        sharpness = max(sharpness, 1e-9)
        if length >= self._count:
            return _softmax(values, self._place, sharpness)
        chance = 0.8 * self._among(values, length, sharpness)
        for shift, share in _EDGES:
            chance += share * self._among(values, self._shifted(law, length, shift * beta), sharpness)
        return chance

    def _among(self, values: Values, length: int, sharpness: float) -> float:
        """Return the token's softmax among the first `length` ids of the ranking."""
        return _softmax(values[: min(length, self._head)], self._place, sharpness) if self._rank < length else 0.0

    def _softmax(self, at: _Tempered, length: int, sharpness: float) -> float:
        """Return the token's chance when the noise is not known."""
        if self._place < 0 or self._rank >= length:
            return 0.0
        if length >= self._count and sharpness == 1:
            return float(np.exp(at.x[self._place] - self._largest) / self._total)
        values = at.x if length >= self._count else at.x[:length]
        return _softmax(values, self._place, max(sharpness, 1e-9))

    def _inverse(self, law: Law, at: _Tempered, length: int, beta: float) -> float:
        """Return the share of the numbers about u that fall into the token's piece of the mass."""
        if self._rank >= length or self._place < 0:
            return 0.0
        kept = np.arange(min(length, len(self._ids)))
        order = kept[np.argsort(self._ids[kept], kind="stable")]
        scale_ = max(self._claim.noise_scale, 1e-9)
        mass = np.cumsum(np.exp((at.x[order] - at.x[0]) / scale_))
        after = int(np.flatnonzero(order == self._place)[0])
        high = mass[after] / mass[-1]
        low = 0.0 if after == 0 else mass[after - 1] / mass[-1]
        u = self._claim.uniform(self._position)
        if beta == 0:
            return float(low <= u < high or (u >= 1 and high >= 1))
        chance = 0.0
        for width, share in ((0.1 * beta, 0.6), (beta, 0.3), (4 * beta, 0.1)):
            left, right = max(0.0, u - width), min(1.0, u + width)
            chance += share * max(0.0, min(high, right) - max(low, left)) / (right - left)
        return chance


def _softmax(values: Values, place: int, sharpness: float) -> float:
    """Return exp(values[place] / sharpness) as a share of the sum over all."""
    return float(1 / np.exp((values - values[place]).clip(max=600 * sharpness) / sharpness).sum())


def _at_least(x: Values, cut: float) -> int:
    """Return how many values of a falling array are at least `cut`."""
    return int(np.searchsorted(-x, -cut, side="right"))
