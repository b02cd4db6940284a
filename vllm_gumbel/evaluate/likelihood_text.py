"""Verifies one record: from its ids, through the model's logits, to a judgement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_gumbel.evaluate.likelihood import UNREADABLE, Judgement, judge, laws
from vllm_gumbel.evaluate.likelihood_row import Law, Look, TokenRow
from vllm_gumbel.evaluate.logits import ModelError, Network
from vllm_gumbel.evaluate.logits_tokens import Tokens, TokensError, tokens_of
from vllm_gumbel.evaluate.records import Record
from vllm_gumbel.evaluate.replayed import Claim, edited
from vllm_gumbel.evaluate.replayed_params import ClaimError

Values = npt.NDArray[np.float64]

#: Tolerances that `fit` compares.
TOLERANCES = tuple(2.0 ** (step / 2) for step in range(-34, 3))


class UnreadableError(Exception):
    """A record cannot be verified; the message says why."""


@dataclass(frozen=True)
class Readable:
    """A record that can be verified.

    Attributes:
        record: itself.
        tokens: its ids.
        claim: how they were drawn.
        notes: what a reader should know, in words.
    """

    record: Record
    tokens: Tokens
    claim: Claim
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Verified:
    """What was found out about one record.

    Attributes:
        record: itself.
        judgement: None if the record is unreadable.
        reason: why it is; empty otherwise.
        looks: at each token.
        tokens: ids of the text.
        notes: what a reader should know, in words.
    """

    record: Record
    judgement: Judgement | None
    reason: str
    looks: tuple[Look, ...]
    tokens: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """Return the verdict in one word."""
        return UNREADABLE if self.judgement is None else self.judgement.verdict

    @property
    def explanation(self) -> str:
        """Return why, in words."""
        return self.reason if self.judgement is None else self.judgement.explanation

    @property
    def matched(self) -> int:
        """Return how many tokens are those that the claim draws."""
        return sum(look.match for look in self.looks)


def readable(record: Record, network: Network, *, wide: bool = False) -> Readable:
    """Return what verifying a record takes.

    Args:
        record: of a file.
        network: the model that is said to have written it.
        wide: for `noise: stock`, whether the server used `use_fp64_gumbel`.

    Raises:
        UnreadableError: it cannot be verified.
    """
    try:
        tokens = tokens_of(record, network.tokenizer, network.vocabulary.size)
        claim = Claim.of(record, network.vocabulary, wide=wide)
    except (TokensError, ClaimError) as error:
        raise UnreadableError(str(error)) from None
    notes = list(tokens.notes)
    if record.noise is None and not claim.is_greedy:
        notes.append("the record names no noise: taken for `gumbel`")
    if claim.is_greedy:
        notes.append("greedy: the tokens say nothing about a seed")
    return Readable(record, tokens, claim, tuple(notes))


def chances(text: Readable, network: Network, tried: Sequence[Law]) -> tuple[Values, list[Look]]:
    """Return every token's chance under every law, float64 [tokens, laws], and what each looks like under the first.

    Raises:
        UnreadableError: the model does not take the text.
    """
    prompt, output = text.tokens.prompt, text.tokens.output
    found, looks = np.empty((len(output), len(tried))), []
    try:
        for place, logits in enumerate(network.rows(prompt, output)):
            position = len(prompt) + place - 1
            row = edited(logits, text.claim, prompt, output[:place])
            token = TokenRow(row, text.claim, tried[0], position, output[place], place)
            found[place] = [token.chance(law) for law in tried]
            looks.append(token.look())
    except ModelError as error:
        raise UnreadableError(str(error)) from None
    return found, looks


def verified(record: Record, network: Network, tolerance: float, alpha: float, *, wide: bool = False) -> Verified:
    """Return what a record's tokens say about its parameters and seed.

    Args:
        record: of a file.
        network: the model that is said to have written it.
        tolerance: size of the difference between server's and verifier's logits.
        alpha: chance of each error.
        wide: for `noise: stock`, whether the server used `use_fp64_gumbel`.
    """
    try:
        text = readable(record, network, wide=wide)
        tried = laws(text.claim, tolerance)
        found, looks = chances(text, network, tried)
    except UnreadableError as error:
        return Verified(record, None, str(error), (), (), ())
    judgement = judge(found, tried, alpha)
    return Verified(record, judgement, "", tuple(looks), tuple(text.tokens.output), text.notes)


def fit(records: Sequence[Record], network: Network, tell: Callable[[], Any]) -> dict[float, float]:
    """Return, tolerance -> log-likelihood in nats, how well each explains texts that are known to be honest.

    Args:
        records: those texts; what cannot be read is left out.
        network: their model.
        tell: called after each.
    """
    totals = np.zeros(len(TOLERANCES))
    for record in records:
        try:
            text = readable(record, network)
            claimed = laws(text.claim, TOLERANCES[-1])[0]
            found, _ = chances(text, network, [replace(claimed, tolerance=each) for each in TOLERANCES])
            totals += np.log(found).sum(axis=0)
        except UnreadableError:
            pass
        tell()
    return dict(zip(TOLERANCES, totals.tolist(), strict=True))
