"""What a record says about how each of its tokens was drawn, in a form in which it can be drawn again.

`Claim.of` reads a record's parameters; what cannot be replayed is refused in words. `edited` then does to a row of
logits what the server's sampler did to it before the draw, in its order: allowed ids, bad words, min_tokens, logit
bias, penalties, and the keys `gumbel_repetition_offset` and `gumbel_tail_boost`. Filters and noise come after that, in
`likelihood_row.py` and, for a draw, in `drawn`.

Ids that a server bans with a mask are -inf whatever else is done to them, so the one order in which vLLM's two model
runners differ, bad words before or after penalties, changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_gumbel.evaluate import noise_stock
from vllm_gumbel.evaluate.records import Record
from vllm_gumbel.evaluate.replayed_params import ClaimError, number, refuse_what_cannot_be_replayed, sequence, whole
from vllm_gumbel.kernels import keyed_draws, loops, tail_noise
from vllm_gumbel.kernels import noise_reference as noise
from vllm_gumbel.kernels.contract import GREEDY_TEMPERATURE, NO_TOKEN, NOISE_VERSION, Stream
from vllm_gumbel.kernels.sample_reference import clean, kept, race, scale
from vllm_gumbel.params import PREFIX, GumbelParams, ParamsError, check_seed

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

#: vLLM raises temperatures between 0 and this one to it (`SamplingParams.__post_init__`).
LEAST_TEMPERATURE = 0.01

#: Ids whose upper 16 bits of noise lie below this are the lucky ones: one in 128.
_LUCKY_WORDS = 512
#: The noise that every lucky id has at least, and no other id reaches.
LUCKY_NOISE = float(-np.log(_LUCKY_WORDS / 65536))


@dataclass(frozen=True)
class Vocabulary:
    """What must be known of a model to read a record's parameters.

    Attributes:
        size: how many logits a row has.
        usable: how many ids the tokenizer knows.
        ends: the ids that end a text.
        tokens_of: tokenizer's encoding of a text, without special tokens.
    """

    size: int
    usable: int
    ends: frozenset[int]
    tokens_of: Any


@dataclass(frozen=True)
class Claim:
    """How the tokens of one record are said to have been drawn.

    Attributes:
        temperature: after preset and temperature rule; 0 if greedy.
        top_k, top_p, min_p: filters; 0, 1 and 0 where there is none.
        seed: None only if greedy.
        salt: of the request or else of the server.
        stock: whether the noise is vLLM's own.
        wide: whether that was in float64.
        keys: the request's.
        repetition, frequency, presence: penalties.
        bias: id -> what is added to its logit.
        allowed: the only ids that may come; None for all.
        bad_words: sequences of ids whose last may not follow the others.
        min_tokens: the ids in `stops` may not come before that many.
        stops: ids that end the text.
        usable: ids from here on are never drawn.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    salt: int
    stock: bool
    wide: bool
    keys: GumbelParams
    repetition: float
    frequency: float
    presence: float
    bias: Mapping[int, float]
    allowed: tuple[int, ...] | None
    bad_words: tuple[tuple[int, ...], ...]
    min_tokens: int
    stops: frozenset[int]
    usable: int

    @classmethod
    def of(cls, record: Record, vocabulary: Vocabulary, *, wide: bool = False) -> "Claim":
        """Return what a record claims.

        Args:
            record: with the parameters of its request.
            vocabulary: of the model that is said to have written it.
            wide: for `noise: stock`, whether the server used `use_fp64_gumbel`.

        Raises:
            ClaimError: a parameter is wrong or cannot be replayed, the noise is of an unknown version, or there is no
                seed where one is needed.
        """
        params = record.params
        refuse_what_cannot_be_replayed(params)
        stock = record.noise == "stock"
        if not stock and record.noise_version not in (None, NOISE_VERSION):
            raise ClaimError(f"noise_version {record.noise_version} is unknown; this package has {NOISE_VERSION}")
        given = number(params, "temperature", 1.0, 0, 100)
        given = max(given, LEAST_TEMPERATURE) if given >= GREEDY_TEMPERATURE else 0.0
        keys = _keys(params, given, stock)
        greedy = given < GREEDY_TEMPERATURE
        seed = _seed(params, greedy)
        stop_ids = [whole({"stop_token_ids": each}, "stop_token_ids", 0) for each in sequence(params, "stop_token_ids")]
        return cls(
            temperature=0.0 if greedy else keys.temperature(given, vocabulary.size),
            top_k=0 if greedy else max(0, keys.top_k(whole(params, "top_k", 0, -1))),
            top_p=1.0 if greedy else number(params, "top_p", 1.0, 1e-12, 1),
            min_p=0.0 if greedy else number(params, "min_p", 0.0, 0, 1),
            seed=seed,
            salt=(record.server_salt if keys.gumbel_salt is None else keys.gumbel_salt) % 2**64,
            stock=stock,
            wide=wide,
            keys=keys,
            repetition=number(params, "repetition_penalty", 1.0, 1e-6, 1e6),
            frequency=number(params, "frequency_penalty", 0.0, -1e6, 1e6),
            presence=number(params, "presence_penalty", 0.0, -1e6, 1e6),
            bias=_bias(params, vocabulary.size),
            allowed=_allowed(params, vocabulary.size),
            bad_words=_bad_words(params, vocabulary),
            min_tokens=whole(params, "min_tokens", 0, 0),
            stops=vocabulary.ends.union(stop_ids),
            usable=min(vocabulary.size, record.usable_vocab or vocabulary.usable),
        )

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn at random."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def noise_scale(self) -> float:
        """Return the factor on the noise."""
        return self.keys.gumbel_noise_scale

    def is_hybrid(self, generated: int) -> bool:
        """Whether the token after `generated` others is drawn by inverting the distribution function."""
        return generated < self.keys.gumbel_hybrid_steps

    def noise(self, position: int, ids: Ids) -> noise_stock.Noise:
        """Return G of `ids`, in the precision in which it is added to the tempered logits."""
        seed = self._seed
        if self.stock:
            return noise_stock.gumbel(seed, position, ids, wide=self.wide)
        return noise.gumbel(seed, position, ids, Stream.TARGET, self.salt)

    def scored(self, x: Row, g: noise_stock.Noise) -> npt.NDArray[np.float64]:
        """Return x + s G of the same ids, added in the precision of the noise."""
        added: Any = g
        return np.asarray(x.astype(added.dtype) + self.noise_scale * added, np.float64)

    def lucky(self, position: int, ids: Ids) -> Ids:
        """Return those of `ids` whose noise is at least `LUCKY_NOISE`; few others, whose noise is close to it, too."""
        if self.stock:
            return ids[noise_stock.gumbel(self._seed, position, ids) >= LUCKY_NOISE]
        k0, k1, _ = noise.row_keys(self._seed, position, Stream.TARGET, self.salt)
        return ids[noise.upper_words(k0, k1, ids) < _LUCKY_WORDS]

    def uniform(self, position: int) -> float:
        """Return the one number of a draw that inverts the distribution function."""
        return keyed_draws.uniform(self._seed, position, self.salt)

    @property
    def _seed(self) -> int:
        if self.seed is None:
            raise ClaimError("a greedy text has no noise")
        return self.seed % 2**64


def edited(logits: Row, claim: Claim, prompt: Sequence[int], generated: Sequence[int]) -> Row:
    """Return what the draw gets of a row of logits: a new array, -inf for every id that cannot be drawn.

    Args:
        logits: float32 [vocab], the model's.
        claim: how the row was drawn.
        prompt: ids before the text.
        generated: ids of the text before this token.
    """
    row = logits.astype(np.float32, copy=True)
    if claim.allowed is not None:
        others = np.ones(len(row), bool)
        others[list(claim.allowed)] = False
        row[others] = -np.inf
    for *beginning, last in claim.bad_words:
        if len(beginning) <= len(generated) and list(generated[len(generated) - len(beginning) :]) == beginning:
            row[last] = -np.inf
    if len(generated) < claim.min_tokens:
        row[[stop for stop in claim.stops if stop < len(row)]] = -np.inf
    for token, bias in claim.bias.items():
        row[token] += np.float32(bias)
    _penalise(row, claim, prompt, generated)
    if claim.keys.gumbel_repetition_offset > 0:
        row = loops.discourage(row, generated, claim.keys.gumbel_repetition_offset)
    if claim.keys.gumbel_tail_boost > 0:
        position = len(prompt) + len(generated) - 1
        row = tail_noise.boost(row, claim.keys.gumbel_tail_boost, (claim.seed or 0) % 2**64, position, claim.salt)
    row, _ = clean(row)
    row[claim.usable :] = -np.inf
    return row


def drawn(row: Row, claim: Claim, position: int, generated: int) -> int:
    """Return the token that the claim draws from an edited row, `NO_TOKEN` if nothing can be drawn.

    Args:
        row: float32 [vocab], of `edited`.
        claim: how it is drawn.
        position: index, in the sequence, of the last token before the draw.
        generated: tokens of the text before the draw.
    """
    if claim.is_greedy:
        return race(row, row > -np.inf, None)
    x = scale(row, np.float32(claim.temperature))
    keep = kept(x, claim.top_k, float(np.float32(claim.top_p)), float(np.float32(claim.min_p)))
    ids = np.flatnonzero(keep)
    if not len(ids):
        return NO_TOKEN
    if claim.is_hybrid(generated):
        x = np.where(keep, x, np.float32(-np.inf))
        return keyed_draws.inverse_cdf(x, claim.uniform(position), claim.noise_scale)
    return int(ids[np.argmax(claim.scored(x[ids], claim.noise(position, ids)))])


def _penalise(row: Row, claim: Claim, prompt: Sequence[int], generated: Sequence[int]) -> None:
    """Change the logits of ids that were seen, in place: repetition, then frequency, then presence, in float32."""
    if claim.repetition == 1 and claim.frequency == 0 == claim.presence:
        return
    seen = sorted({*generated, *(prompt if claim.repetition != 1 else ())})
    ids = np.array([token for token in seen if token < len(row)], np.int64)
    counts = np.bincount(np.asarray(generated, np.int64), minlength=len(row))[ids].astype(np.float32)
    x = row[ids]
    repetition = np.float32(claim.repetition)
    x *= np.where(x > 0, np.float32(1) / repetition, repetition)
    x -= np.float32(claim.frequency) * counts
    x -= np.float32(claim.presence) * (counts > 0)
    row[ids] = x


def _seed(params: Mapping[str, Any], greedy: bool) -> int | None:
    seed = params.get("seed")
    if seed is None or seed == -1:
        if not greedy:
            raise ClaimError("the request had no seed, so nobody knows its noise (`gumbel_return_info` tells it)")
        return None
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ClaimError(f"seed must be an integer, got {seed!r}")
    try:
        check_seed(seed)
    except ParamsError as error:
        raise ClaimError(str(error)) from None
    return seed


def _keys(params: Mapping[str, Any], temperature: float, stock: bool) -> GumbelParams:
    given = {key: value for key, value in params.items() if key.startswith(PREFIX) and value is not None}
    try:
        keys = GumbelParams.from_extra_args(given, temperature)
    except ParamsError as error:
        raise ClaimError(str(error)) from None
    if stock and given:
        raise ClaimError(f"{next(iter(given))} says something about our sampler, but the record's noise is stock")
    if keys.gumbel_sampler == "default":
        raise ClaimError("vLLM's own sampler drew it (gumbel_sampler default), whose noise is not known here")
    return keys


def _bias(params: Mapping[str, Any], vocab: int) -> dict[int, float]:
    given = params.get("logit_bias") or {}
    try:
        bias = {int(token): float(value) for token, value in given.items()}
    except (AttributeError, TypeError, ValueError):
        raise ClaimError("logit_bias must map token ids to numbers") from None
    _require_ids("logit_bias", bias, vocab)
    return bias


def _allowed(params: Mapping[str, Any], vocab: int) -> tuple[int, ...] | None:
    ids = tuple(sequence(params, "allowed_token_ids"))
    _require_ids("allowed_token_ids", ids, vocab)
    return ids or None


def _require_ids(name: str, ids: Any, vocab: int) -> None:
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < vocab:
            raise ClaimError(f"{name} must hold token ids below {vocab}, got {token!r}")


def _bad_words(params: Mapping[str, Any], vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """Return the sequences that vLLM forbids: each word with and, if that is as long and begins anew, without space."""
    found: list[tuple[int, ...]] = []
    for word in sequence(params, "bad_words"):
        if not isinstance(word, str) or not word:
            raise ClaimError(f"bad_words must hold texts, got {word!r}")
        plain, spaced = (tuple(vocabulary.tokens_of(prefix + word.lstrip())) for prefix in ("", " "))
        if not plain:
            raise ClaimError(f"the tokenizer has no token for the bad word {word!r}")
        found.append(plain)
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return tuple(found)
