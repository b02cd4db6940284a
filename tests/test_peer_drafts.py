"""What vLLM's tests of its verification of drafts demand, demanded of ours, which accepts a draft by exact match.

Logits are `PEAK` at the token that is to come, and 1 less at a second choice: at 0.01 a draw gives the largest too.
"""

from dataclasses import replace

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from tests.statistics import assert_goodness_of_fit
from tests.test_rows import detached
from tests.test_v1_sampler import MODES, batch_of, draw, random_logits
from vllm_gumbel.integration import compat
from vllm_gumbel.integration.speculative import Verifier
from vllm_gumbel.integration.v1 import GumbelSampler

NAN = float("nan")
VOCAB, PEAK, SECOND = 100, 100.0, 15
GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 0.01, "seed": 3}


@pytest.fixture(scope="module", autouse=True)
def stock_kernels():
    """vLLM's own verification needs what a worker on a CPU loads."""
    compat.allow_another_engine()  # other tests of this process have loaded Numba
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


both_ways = pytest.mark.parametrize("how", [GREEDY, DRAWN], ids=["greedy", "drawn"])


def speculation(drafts):
    """Return vLLM's metadata of drafts, one list a request; a request's rows follow one another, its last one extra."""
    metadata = SpecDecodeMetadata.make_dummy(drafts, device=torch.device("cpu"))
    ends = metadata.cu_num_sampled_tokens.long() - 1
    rows = torch.arange(int(ends[-1]) + 1)
    metadata.bonus_logits_indices = ends
    metadata.target_logits_indices = rows[~torch.isin(rows, ends)]
    return metadata


def peaks(tokens, second=None, vocab=VOCAB):
    """Return logits [rows, vocab] that give these tokens, one list a request, with a second choice if there is one."""
    flat = [token for each in tokens for token in each]
    logits = torch.full((len(flat), vocab), -PEAK)
    if second is not None:
        logits[:, second] = PEAK - 1
    logits[range(len(flat)), flat] = PEAK
    return logits


def verify(drafts, logits, parameters, kind=Verifier, mode="raw_logprobs", **wanted):
    """Return a verifier's output for these drafts; `parameters` are one dictionary a request."""
    batch = batch_of(parameters, logits.shape[1])
    sampler = (GumbelSampler if kind is Verifier else Sampler)(logprobs_mode=mode)
    return kind(sampler)(speculation(drafts), None, logits.clone(), replace(batch.sampling_metadata, **wanted))


def sent(output):
    """Return the tokens that are sent, one list a request; nothing follows a place that was not accepted."""
    rows = output.sampled_token_ids.tolist()
    assert output.sampled_token_ids.dtype == torch.int32
    found = [[token for token in row if token >= 0] for row in rows]
    assert [each + [-1] * (len(rows[0]) - len(each)) for each in found] == rows
    return found


CASES = {
    "all accepted": ([[1, 2, 3]], [[1, 2, 3, 4]], [[1, 2, 3, 4]]),
    "second differs": ([[1, 2, 3]], [[1, 5, 3, 4]], [[1, 5]]),
    "first differs": ([[1]], [[2, 3]], [[2]]),
    "two requests": ([[1, 2], [3]], [[1, 2, 5], [3, 4]], [[1, 2, 5], [3, 4]]),
    "one draft": ([[1]], [[1, 2]], [[1, 2]]),
    "no draft": ([[]], [[5]], [[5]]),
    "no draft beside drafts": ([[], [4, 6], []], [[5], [4, 6, 7], [8]], [[5], [4, 6, 7], [8]]),
    "both differ": ([[1, 2, 3], [4, 5, 6]], [[1, 2, 7, 6], [4, 8, 6, 9]], [[1, 2, 7], [4, 8]]),
    "one differs": ([[1, 2], [3, 4]], [[1, 5, 6], [3, 4, 7]], [[1, 5], [3, 4, 7]]),
    "missing draft": ([[1, -1, 3]], [[1, 2, 3, 4]], [[1, 2]]),
    "missing first draft": ([[-1, -1]], [[7, 8, 9]], [[7]]),
}


@both_ways
@pytest.mark.parametrize(("drafts", "tokens", "expected"), CASES.values(), ids=CASES)
def test_drafts_are_accepted_up_to_the_first_that_differs(how, drafts, tokens, expected):
    """The token at that place is sent, and if all are accepted one more; an id of -1 is no draft. As in vLLM."""
    assert sent(verify(drafts, peaks(tokens), [how] * len(drafts))) == expected
    if how is GREEDY:
        stock = verify(drafts, peaks(tokens), [how] * len(drafts), RejectionSampler)
        assert [[token for token in row if token >= 0] for row in stock.sampled_token_ids.tolist()] == expected


@pytest.mark.parametrize("drafts", [1, 3, 5])
@pytest.mark.parametrize("requests", [1, 4, 8])
def test_seeded_requests_repeat_themselves_beside_unseeded_ones(drafts, requests):
    logits = torch.rand(requests * (drafts + 1), 1000, generator=torch.Generator().manual_seed(drafts))
    seeded = [{"temperature": 1.0, "seed": i} if i % 2 == 0 else {"temperature": 1.0} for i in range(requests)]
    guesses = draw(
        logits, batch_of([{"temperature": 1.0, "seed": i // (drafts + 1)} for i in range(len(logits))], 1000)
    )
    given = [guesses[i * (drafts + 1) :][:drafts] for i in range(requests)]
    first, *others = [sent(verify(given, logits, seeded)) for _ in range(5)]
    assert all(other[::2] == first[::2] for other in others)


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_what_is_sent_follows_the_target_whatever_drafts(spread):
    """20,000 requests of two drafts; each place that is reached, at a false alarm of 1e-6.

    Drafts are drawn with their own noise from a law that is the target's, near it, or far from it.
    """
    source, requests, steps = torch.Generator().manual_seed(7), 20_000, 2
    target = torch.randn(10, generator=source)
    draft = (target + spread * torch.randn(10, generator=source)).softmax(-1)
    drafts = torch.multinomial(draft.repeat(requests, 1), steps, replacement=True, generator=source)
    metadata = replace(detached(requests), temperature=torch.ones(requests), top_k=None, top_p=None)
    verifier = Verifier(GumbelSampler())
    output = verifier(speculation(drafts.tolist()), None, target.repeat(requests * (steps + 1), 1), metadata)
    accepted = output.sampled_token_ids
    for place in range(steps + 1):
        reached = accepted[:, place][accepted[:, place] >= 0]
        assert len(reached) > 100
        counts = torch.bincount(reached.long(), minlength=10)
        assert_goodness_of_fit(
            observed=counts.numpy(), probabilities=target.softmax(-1).numpy(), claim=f"place {place}"
        )


@pytest.mark.parametrize(
    "filters", [{"top_k": k} for k in (1, 5, 99)] + [{"top_p": p} for p in (0.5, 0.9, 0.99)] + [{"min_p": 0.4}], ids=str
)
def test_no_token_outside_the_filters_is_sent(filters):
    """With drafts as they come, also outside; each row's kept set is that without drafts."""
    requests, steps = 30, 3
    logits = random_logits(requests * (steps + 1), VOCAB, seed=1).div(3)
    parameters = [{"temperature": 1.0, "seed": i, **filters} for i in range(requests)]
    drafts = torch.randint(VOCAB, (requests, steps), generator=torch.Generator().manual_seed(2)).tolist()
    best = logits.argmax(-1).tolist()
    drafts[::2] = [best[i * (steps + 1) :][:steps] for i in range(0, requests, 2)]
    found = sent(verify(drafts, logits, parameters))
    spread = [parameters[i // (steps + 1)] for i in range(len(logits))]
    sampler, batch = GumbelSampler(logprobs_mode="processed_logits"), batch_of(spread, VOCAB)
    shown = sampler(logits.clone(), replace(batch.sampling_metadata, max_num_logprobs=-1)).logprobs_tensors.logprobs
    for i, tokens in enumerate(found):
        for place, token in enumerate(tokens):
            assert shown[i * (steps + 1) + place, token] > -torch.inf
    assert {len(each) for each in found} >= {1, 2}


#: Drafts, tokens that the logits give, what each request asks for, and what is sent; one generated token is 40.
EDITED = {
    "frequency penalty": (
        [[1, 1, 1], [], [1, 1, 1]],
        [[1, 1, 1, 1], [7], [1, 1, 1, 1]],
        [{"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}, {"frequency_penalty": 0.7}],
        [[1, SECOND], [7], [1, 1, SECOND]],
    ),
    "presence penalty": ([[1, 2]], [[1, 2, 1]], [{"presence_penalty": 1.5}], [[1, 2, SECOND]]),
    "repetition penalty": ([[1, 2]], [[1, 2, 1]], [{"repetition_penalty": 1.5}], [[1, 2, SECOND]]),
    "bad words": (  # of one request and not the next; beginning in drafts, or in output and draft
        [[1, 2, 3], [1, 15, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]],
        [[1, 2, 3, 4], [1, 15, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]],
        [{"bad_ids": [[2]]}, {}, {"bad_ids": [[2]]}, {"bad_ids": [[1, 2, 3]]}, {"bad_ids": [[40, 1, 2], [41, 1, 2]]}],
        [[1, SECOND], [1, SECOND, 3, 4], [1, SECOND], [1, 2, SECOND], [1, SECOND]],
    ),
    "allowed ids": (
        [[1, 2, 10], [10, 5, 3], [7, 10, 12]],
        [[1, 2, 10, 5], [10, 5, 10, 5], [7, 10, 12, 5]],
        [{"allowed_token_ids": [*range(5, VOCAB)]}, {"allowed_token_ids": [*range(6, VOCAB)]}, {}],
        [[SECOND], [10, SECOND], [7, 10, 12, 5]],
    ),
    "least length": (  # drafts count
        [[1, SECOND, 30], [30, 2, 3]],
        [[1, 30, 30, 30], [30, 2, 3, 4]],
        [{"stop_token_ids": [30], "min_tokens": 3}, {"stop_token_ids": [30], "min_tokens": 1}],
        [[1, SECOND, 30, 30], [30, 2, 3, 4]],
    ),
    "bias": (  # vLLM refuses one beside drafts when a request comes; where it is there all the same, it acts
        [[SECOND, 2], [1, 2], []],
        [[1, 2, 3], [1, 2, 3], [4]],
        [{"logit_bias": {SECOND: 80.0}}, {}, {"logit_bias": {SECOND: 80.0}}],
        [[SECOND, SECOND], [1, 2, 3], [SECOND]],
    ),
}


@both_ways
@pytest.mark.parametrize(("drafts", "tokens", "asked", "expected"), EDITED.values(), ids=EDITED)
def test_edits_of_a_row_see_the_drafts_before_it(how, drafts, tokens, asked, expected):
    """The second choice is sent where the first has been moved below it, or masked."""
    parameters = [{**how, "prompt": [9], "output": [40], "stop": None, **each} for each in asked]
    assert sent(verify(drafts, peaks(tokens, SECOND), parameters)) == expected


@pytest.mark.parametrize("vocab", [100, 8193, 10_000, 151_936])
def test_tokens_lie_within_the_vocabulary_though_its_end_is_masked(vocab):
    """GHSA-8wr5-jm2h-8r4f: with rows of one id that its draft misses, and rows of many."""
    logits = random_logits(6, vocab).div(2)
    logits[:, vocab // 8192 * 8192 or 1 :] = -torch.inf
    for drafts in ([[0, 0], [5, vocab - 1]], [[1, 1], [0, 0]]):
        found = sent(verify(drafts, logits, [{"temperature": 1.0, "seed": i} for i in range(2)]))
        limit = vocab // 8192 * 8192 or 1
        assert all(0 <= token < limit for each in found for token in each)


@both_ways
@pytest.mark.parametrize("bad", [0, 1])
def test_row_of_nan_gives_an_id_of_the_vocabulary(how, bad):
    logits = random_logits(12, 20_000)
    clean = sent(verify([[1], [2], [3], [4], [5], [6]], logits, [how] * 6))
    logits[2 + bad] = NAN
    found = sent(verify([[1], [2], [3], [4], [5], [6]], logits, [how] * 6))
    assert found[:1] + found[2:] == clean[:1] + clean[2:]
    assert all(0 <= token < 20_000 for token in found[1])


def test_request_gets_what_it_gets_in_a_part_of_the_batch():
    requests, steps = 5, 3
    logits = random_logits(requests * (steps + 1), 257)
    padded = torch.zeros(len(logits), 260)
    padded[:, :257] = logits
    parameters = [{"prompt": [1] * (i + 1), "temperature": 0.6, "seed": i, "top_p": 0.9} for i in range(requests)]
    whole = sent(
        verify([logits[i * 4 :][:3].argmax(-1).tolist() for i in range(requests)], padded[:, :257], parameters)
    )
    parts = []
    for start, end in ((0, 2), (2, 5)):
        drafts = [logits[i * 4 :][:3].argmax(-1).tolist() for i in range(start, end)]
        parts += sent(verify(drafts, logits[start * 4 : end * 4], parameters[start:end]))
    assert parts == whole


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wanted", [0, 3])
def test_logprobs_with_drafts_are_those_without(mode, wanted):
    """Values, ids and ranks of every token that is sent, within 1e-3, for requests that draw and greedy ones."""
    requests, steps = 6, 3
    logits = random_logits(requests * (steps + 1), VOCAB)
    parameters = [
        {"temperature": 0.8 * (i % 2), "seed": i, "top_k": 30, "presence_penalty": 0.3} for i in range(requests)
    ]
    history, plain = [[] for _ in range(requests)], []
    for step in range(steps + 1):
        batch = batch_of([{**each, "output": out} for each, out in zip(parameters, history, strict=True)], VOCAB)
        sampler = GumbelSampler(logprobs_mode=mode)
        output = sampler(logits[step :: steps + 1].clone(), replace(batch.sampling_metadata, max_num_logprobs=wanted))
        plain.append(output.logprobs_tensors)
        for out, (token,) in zip(history, output.sampled_token_ids.tolist(), strict=True):
            out.append(token)
    output = verify([each[:steps] for each in history], logits, parameters, mode=mode, max_num_logprobs=wanted)
    assert sent(output) == history, "right drafts are all accepted"
    found = output.logprobs_tensors
    for i in range(requests):
        for step in range(steps + 1):
            place = i * (steps + 1) + step
            assert torch.equal(found.logprob_token_ids[place].int(), plain[step].logprob_token_ids[i].int())
            assert torch.allclose(found.logprobs[place], plain[step].logprobs[i], rtol=0, atol=1e-3)
            assert found.selected_token_ranks[place] == plain[step].selected_token_ranks[i]
