"""Logprobs of rows that may hold NaN or +inf: vLLM's where those are numbers, and never what JSON lacks."""

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

_LARGEST = torch.finfo(torch.float32).max


def finite(logprobs: LogprobsTensors) -> LogprobsTensors:
    """Return logprobs that JSON can carry: NaN as -inf, which vLLM's server floors, +inf as the largest float32."""
    logprobs.logprobs.nan_to_num_(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)
    return logprobs


def compute(logits: torch.Tensor) -> torch.Tensor:
    """Return float32 log-probabilities of `logits` [rows, vocab].

    A NaN counts as -inf; where some logits are +inf, those share the mass. A row without any finite logit is all
    -inf. (vLLM's are NaN for every id of such rows, and a response with them is not valid JSON.)
    """
    logprobs = Sampler.compute_logprobs(logits)
    bad = logprobs[:, :1].isnan().flatten()  # one NaN or +inf, or no finite logit, makes the whole row NaN
    if bad.any():
        row = logits[bad].float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        infinite = row.isposinf()
        row = torch.where(infinite.any(-1, keepdim=True), torch.where(infinite, 0.0, -torch.inf), row)
        logprobs[bad] = row.log_softmax(dim=-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    return logprobs


def gather(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
    """Return ids, logprobs and ranks of `token_ids` [rows] and of the best, none of them a NaN."""
    gathered = Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
    if gathered.logprobs[:, 1:2].isnan().any():  # where there is one, topk takes it for the largest
        cleaned = logprobs.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        gathered = Sampler.gather_logprobs(cleaned, num_logprobs, token_ids)
    return gathered
