"""Opens when one arm's draws go wrong more often than is tolerated, and stays open until somebody closes it.

What is counted are hard anomalies: draws that cannot be right, whatever the model says. A cumulative sum of their log
likelihood ratio (Page 1954, "Continuous inspection schemes") against the tolerated rate needs no window and no least
number of tokens: a few anomalies in a row open it, so does a rate a little above the tolerated one, later. Its mean
time to a false alarm is at least `TOKENS_TO_FALSE_ALARM` tokens at the tolerated rate (Lorden 1971, theorem 2: at least
exp(threshold)).
"""

import logging
import math

logger = logging.getLogger("vllm.gumbel")

#: Tokens between two false alarms, on average and at least, of an arm whose rate is just tolerated.
TOKENS_TO_FALSE_ALARM = 1e9

#: How many times the tolerated rate the sum is tuned to find soonest.
TUNED_TO = 10


class Breaker:
    """Watches one arm of one worker.

    Args:
        rate: tolerated share of hard anomalies, in (0, 1 / TUNED_TO); 0 for a breaker that never opens by itself.

    Attributes:
        reason: why it is open, None while it is closed.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._tokens = self._hard = 0
        self._sum = 0.0
        self.reason: str | None = None
        if rate > 0:
            self._gain = math.log(TUNED_TO)
            self._loss = math.log1p(-rate) - math.log1p(-TUNED_TO * rate)
            self._threshold = math.log(TOKENS_TO_FALSE_ALARM)

    @property
    def is_open(self) -> bool:
        """Whether the arm gets no new requests."""
        return self.reason is not None

    def add(self, tokens: int, hard: int, kind: str) -> bool:
        """Count drawn tokens, so many of them hard anomalies of some kind; return whether that opened the breaker."""
        if self._rate == 0 or self.is_open:
            return False
        self._sum = max(0.0, self._sum + hard * self._gain - (tokens - hard) * self._loss)
        if self._sum == 0:
            self._tokens = self._hard = 0
            return False
        self._tokens += tokens
        self._hard += hard
        if self._sum < self._threshold:
            return False
        self.open(f"{self._hard} hard anomalies (last: {kind}) in {self._tokens} tokens, tolerated {self._rate:g}")
        return True

    def open(self, reason: str) -> None:
        """Open it."""
        self.reason = reason

    def close(self) -> None:
        """Close it, with a clean slate."""
        self.reason = None
        self._tokens = self._hard = 0
        self._sum = 0.0
