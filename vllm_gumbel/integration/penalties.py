"""Penalties as sparse counts per request, updated by the tokens that arrived.

vLLM rebuilds a padded matrix of all output tokens at every step and touches every logit of every row. A penalty only
concerns the tokens that a request has seen, so here each request keeps those with their counts, and a step costs the
tokens that are new and one pass over the seen ones. Same arithmetic in float32, to the last bit: repetition
(Keskar et al. 2019, "CTRL", section 4.1), then frequency, then presence.
"""

import numpy as np
import numpy.typing as npt
from vllm.sampling_params import SamplingParams


class PenaltyCounts:
    """The tokens that one request has seen, and how often it generated each.

    Args:
        prompt: ids of the prompt; None if it was given as embeddings.
        params: the request's parameters.
    """

    def __init__(self, prompt: list[int] | None, params: SamplingParams) -> None:
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        # Only the repetition penalty looks at the prompt.
        seen = sorted(set(prompt)) if prompt and self._repetition != 1 else []
        self._prompt_size = len(seen)
        self._slots = {token: slot for slot, token in enumerate(seen)}
        self._ids = np.array(seen, np.int64)
        self._counts = np.zeros(len(seen), np.float32)
        self._generated = 0

    @classmethod
    def of(cls, prompt: list[int] | None, params: SamplingParams) -> "PenaltyCounts | None":
        """Return the counts of a request; None if it has no penalty."""
        penalties = (params.repetition_penalty - 1, params.frequency_penalty, params.presence_penalty)
        return cls(prompt, params) if any(penalties) else None

    def update(self, output: list[int]) -> None:
        """Count the generated tokens that are new; `output` are all of them, with -1 for those not known yet."""
        if len(output) < self._generated:  # tokens were taken back
            self._forget_output()
        for token in output[self._generated :]:
            if token < 0:
                break
            self.push(token)

    def push(self, token: int) -> None:
        """Count one more generated token."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._grow()
        self._ids[slot] = token
        self._counts[slot] += 1
        self._generated += 1

    def pop(self, token: int) -> None:
        """Take back the token that was pushed last."""
        slot = self._slots[token]
        self._counts[slot] -= 1
        self._generated -= 1
        if self._counts[slot] == 0 and slot >= self._prompt_size:
            del self._slots[token]  # the last slot, since tokens are taken back in reverse

    def apply(self, row: npt.NDArray[np.float32]) -> None:
        """Change a row of logits, float32 [vocab], in place."""
        ids, counts = self._ids[: len(self._slots)], self._counts[: len(self._slots)]
        x = row[ids]
        if self._repetition != 1:
            x *= np.where(x > 0, np.float32(1) / self._repetition, self._repetition)  # rounded as vLLM rounds it
        x -= self._frequency * counts
        x -= self._presence * (counts > 0)
        row[ids] = x

    def _grow(self) -> None:
        more = max(16, len(self._ids))
        self._ids = np.concatenate([self._ids, np.zeros(more, np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(more, np.float32)])

    def _forget_output(self) -> None:
        self._slots = {token: slot for token, slot in self._slots.items() if slot < self._prompt_size}
        self._counts[:] = 0
        self._generated = 0
