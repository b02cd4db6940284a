"""A logits processor for vLLM that spoils logits on request, to test rows that cannot be drawn."""

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

#: What `extra_args["spoil"]` may ask for, from the output token number `spoil_from` on (0 by default).
SPOILS = {
    "all_nan": lambda row: torch.full_like(row, torch.nan),
    "some_nan": lambda row: torch.cat([torch.full_like(row[: len(row) // 2], torch.nan), row[len(row) // 2 :]]),
    "all_masked": lambda row: torch.full_like(row, -torch.inf),
}


class SpoilLogits(AdapterLogitsProcessor):
    """Overwrites a request's logits with NaN or -inf, if its `extra_args` ask for that."""

    def is_argmax_invariant(self):
        """Return False: it changes what greedy decoding would choose."""
        return False

    def new_req_logits_processor(self, params):
        """Return what spoils one request's rows; None if it does not ask."""
        arguments = params.extra_args or {}
        if "spoil" not in arguments:
            return None
        spoil, first = SPOILS[arguments["spoil"]], arguments.get("spoil_from", 0)

        def process(output_ids, logits):
            return spoil(logits) if len(output_ids) >= first else logits

        return process


class HalveTempered(AdapterLogitsProcessor):
    """Argmax-invariant processor of another package: halves the tempered logits, as twice the temperature would."""

    def is_argmax_invariant(self):
        """Return True: the largest stays the largest."""
        return True

    def new_req_logits_processor(self, params):
        """Return the processor for a request that asks for it with `halve`."""
        if not (params.extra_args or {}).get("halve"):
            return None
        return lambda output_ids, logits: logits * 0.5
