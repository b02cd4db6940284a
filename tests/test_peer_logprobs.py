"""What vLLM's tests of logprobs demand, demanded of ours: values, ranks, modes, chosen ids, chunks of prompts."""

from dataclasses import replace

import pytest
import torch
from vllm.v1.sample.sampler import Sampler

from tests.test_v1_sampler import MODES, batch_of, processed, random_logits, tokens_of
from tests.test_v1_sampler import stock_kernels as stock_kernels  # a fixture of this module too
from vllm_gumbel.integration.v1 import GumbelSampler

ROWS, VOCAB = 12, 500
PARAMETERS = [{"temperature": 0.8, "seed": i, "top_k": 20 + i, "top_p": 0.95} for i in range(ROWS)]

each_mode = pytest.mark.parametrize("mode", MODES)


def sampled(kind, mode, logits, **wanted):
    """Return a sampler's tokens and logprobs for `logits` [rows, vocab] with the wishes for logprobs in `wanted`."""
    batch = batch_of(PARAMETERS[: len(logits)], logits.shape[1])
    output = kind(logprobs_mode=mode)(logits.clone(), replace(batch.sampling_metadata, **wanted))
    return tokens_of(output), output.logprobs_tensors


def every(mode, logits):
    """Return the values of all ids in a mode, float32 [rows, vocab]; stock's, which ours are held to."""
    batch = batch_of(PARAMETERS[: len(logits)], logits.shape[1])
    ours, stock = (processed(kind(logprobs_mode=mode), logits, batch)[1] for kind in (GumbelSampler, Sampler))
    assert torch.equal(ours, stock)
    return stock


@each_mode
def test_nobody_who_wants_none_gets_logprobs(mode):
    assert sampled(GumbelSampler, mode, random_logits(ROWS, VOCAB))[1] is None


@each_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [0, 1, 3, 7])
def test_drawn_token_comes_first_then_as_many_of_the_best_as_were_asked_for(mode, dtype, wanted):
    """Each with the value it has in the mode; the rank of the drawn token counts those that are no worse."""
    logits = random_logits(ROWS, VOCAB, dtype=dtype)
    tokens, found = sampled(GumbelSampler, mode, logits, max_num_logprobs=wanted)
    values = every(mode, logits)
    assert tokens == sampled(GumbelSampler, mode, logits)[0], "logprobs change no token"
    assert found.logprobs.shape == found.logprob_token_ids.shape == (ROWS, wanted + 1)
    assert found.logprob_token_ids[:, 0].tolist() == tokens
    listed = values.gather(1, found.logprob_token_ids.long())
    assert torch.allclose(found.logprobs, listed, rtol=0, atol=1e-5)
    assert torch.allclose(found.logprobs[:, 1:], values.topk(wanted).values, rtol=0, atol=1e-5)
    own = listed[:, :1]
    assert (found.selected_token_ranks <= (values >= own - 1e-5).sum(-1)).all()
    assert (found.selected_token_ranks >= (values > own + 1e-5).sum(-1) + 1).all()
    for row, rank in zip(found.logprob_token_ids.tolist(), found.selected_token_ranks.tolist(), strict=True):
        best = row[1:]
        assert len(set(best)) == wanted
        assert rank > wanted or dtype != torch.float32 or best[rank - 1] == row[0], "within the best it is at its rank"


@each_mode
def test_log_probabilities_are_never_above_0_and_logits_may_be(mode):
    """Also where one id has all the mass that a float32 can tell from 1."""
    sampler = GumbelSampler(logprobs_mode=mode)
    metadata = batch_of([PARAMETERS[i % ROWS] for i in range(120)], 997).sampling_metadata
    for seed, top in enumerate((0.0, 6.0, 12.0, 15.0, 16.0, 40.0)):
        logits = random_logits(120, 997, seed=seed).div(4)
        logits[:, 100] += top
        for wanted in (0, 2, -1):
            values = sampler(logits.clone(), replace(metadata, max_num_logprobs=wanted)).logprobs_tensors.logprobs
            assert values.max() <= 0 if mode.endswith("logprobs") else values.max() > 0


@each_mode
def test_all_logprobs_are_one_for_each_id(mode):
    _, found = sampled(GumbelSampler, mode, random_logits(ROWS, VOCAB), max_num_logprobs=-1)
    assert found.logprobs.shape == (ROWS, VOCAB)
    if mode.endswith("logprobs"):
        assert torch.allclose(found.logprobs.exp().sum(-1), torch.ones(ROWS), atol=1e-5)


@each_mode
def test_chosen_ids_get_their_values_and_win_over_a_number(mode):
    """Lists of several lengths, and requests without one; what is missing is -inf, the drawn token comes first."""
    logits = random_logits(ROWS, VOCAB)
    chosen = {i: [(i * 37 + k * 11) % VOCAB for k in range(1 + i % 4)] for i in range(0, ROWS, 2)}
    values, most = every(mode, logits), 3
    for wanted in (None, 5):
        tokens, found = sampled(GumbelSampler, mode, logits, logprob_token_ids=chosen, max_num_logprobs=wanted)
        theirs = sampled(Sampler, mode, logits, logprob_token_ids=chosen, max_num_logprobs=wanted)[1]
        assert torch.equal(found.logprobs[:, 1:], theirs.logprobs[:, 1:])
        assert torch.equal(found.logprob_token_ids[:, 1:], theirs.logprob_token_ids[:, 1:])
        assert found.logprobs.shape == (ROWS, most + 1)
        for i, token in enumerate(tokens):
            ids = [token, *chosen.get(i, [])]
            assert found.logprob_token_ids[i, : len(ids)].tolist() == ids
            assert torch.equal(found.logprobs[i, : len(ids)], values[i, ids])
            assert (found.logprobs[i, len(ids) :] == -torch.inf).all()
            assert found.selected_token_ranks[i] == (values[i] >= values[i, token]).sum()


@pytest.mark.parametrize("wanted", [0, 1, 3])
def test_numba_gathers_what_vllm_gathers_from_a_softmax(wanted):
    """Ids, ranks and, within 1e-5, values, for tokens that were not drawn too."""
    logits = random_logits(40, VOCAB, seed=3)
    tokens = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(1))
    expected = Sampler.gather_logprobs(Sampler.compute_logprobs(logits), wanted, tokens)
    found = GumbelSampler().raw_logprobs(logits, tokens, wanted)
    assert torch.equal(found.logprob_token_ids.int(), expected.logprob_token_ids)
    assert torch.equal(found.selected_token_ranks, expected.selected_token_ranks)
    assert torch.allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbour_that_asks_for_all_ids_changes_no_logprob_and_no_order_of_ties(dtype):
    """What a request gets are the first columns of the batch's, of which there are as many as its neediest row asks."""
    logits = random_logits(8, 3000, seed=5, dtype=dtype).mul(4).round().div(4)
    tokens = torch.arange(8)
    everything = GumbelSampler().raw_logprobs(logits, tokens, 3000)
    for wanted in (0, 5, 1025):
        found = GumbelSampler().raw_logprobs(logits, tokens, wanted)
        assert torch.equal(found.logprobs, everything.logprobs[:, : wanted + 1])
        assert torch.equal(found.logprob_token_ids, everything.logprob_token_ids[:, : wanted + 1])
        assert torch.equal(found.selected_token_ranks, everything.selected_token_ranks)


def test_ranks_count_the_ids_that_are_no_worse():
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 7.0, 7.0], [-torch.inf, 0.0, -torch.inf]])
    tokens = torch.tensor([1, 1, 2, 0])
    for found in (GumbelSampler.gather_logprobs(values, 0, tokens), GumbelSampler().raw_logprobs(values, tokens, 0)):
        assert found.selected_token_ranks.tolist() == [2, 2, 3, 3]


def test_gathering_is_compiled_once_for_all_batch_sizes():
    """vLLM counts ranks with a compiled function; ours hands it tensors that need no second one."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    compiled = []
    for rows in (1, 2, 8):
        logprobs = torch.randn(rows, 32).log_softmax(-1)
        GumbelSampler.gather_logprobs(logprobs, 3, torch.arange(rows))
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled[0] == compiled[1] == compiled[2]


@each_mode
@pytest.mark.parametrize("chunk", [1, 3, 4, 1024])
def test_logprobs_of_a_prompt_do_not_depend_on_its_chunks(mode, chunk):
    """The model runner calls the two functions of its sampler for the rows of each chunk."""
    logits, ids = random_logits(13, VOCAB, seed=5), torch.arange(13) * 7
    as_asked = GumbelSampler.compute_logprobs if mode.endswith("logprobs") else torch.Tensor.float
    whole = GumbelSampler.gather_logprobs(as_asked(logits), 3, ids)
    stock = Sampler.gather_logprobs(
        Sampler.compute_logprobs(logits) if mode.endswith("logprobs") else logits.float(), 3, ids
    )
    pieces = [
        GumbelSampler.gather_logprobs(as_asked(logits[i : i + chunk]), 3, ids[i : i + chunk])
        for i in range(0, 13, chunk)
    ]
    for name in ("logprobs", "logprob_token_ids", "selected_token_ranks"):
        assert torch.equal(torch.cat([getattr(piece, name) for piece in pieces]), getattr(whole, name))
        assert torch.equal(getattr(stock, name), getattr(whole, name))
