"""What vLLM's tests of its filters demand, demanded of ours: top_k, top_p, min_p, masks, rows that cannot be drawn.

The kept sets are those that our sampler shows in `processed_logits`, set against vLLM's filters by sorting. vLLM keeps
all that tie with the k-th, and sums masses in float32; ours keeps exactly k, lowest ids first, and sums in float64.
"""

from dataclasses import replace

import pytest
import torch
from vllm.v1.sample.logits_processor import MinPLogitsProcessor
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from tests.statistics import assert_goodness_of_fit
from tests.test_rows import detached
from tests.test_v1_sampler import STOP, batch_of, draw, processed, random_logits
from vllm_gumbel.integration.v1 import GumbelSampler

NAN, INFINITY, LARGEST = float("nan"), float("inf"), torch.finfo(torch.float32).max
FILTERS = {"top_k": {"top_k": 50}, "top_p": {"top_p": 0.9}, "both": {"top_k": 50, "top_p": 0.9}}
SHAPES = [(1, 1024), (32, 1024), (8, 32_000), (3, 128_256)]

each_filter = pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
mostly_masked = pytest.mark.parametrize("share", [0.5, 0.9, 0.99])


def generator(seed=42):
    return torch.Generator().manual_seed(seed)


def ours(logits, parameters):
    """Return the logits that our filters leave, and the tokens; temperature 1, one dictionary a row or one for all."""
    parameters = [parameters] * len(logits) if isinstance(parameters, dict) else parameters
    requests = [{"temperature": 1.0, "seed": i, **each} for i, each in enumerate(parameters)]
    sampler = GumbelSampler(logprobs_mode="processed_logits")
    tokens, values = processed(sampler, logits, batch_of(requests, logits.shape[1]))
    assert not values.isnan().any()
    kept = values > -torch.inf
    assert torch.equal(values[kept], logits[kept].float().clamp(max=LARGEST)), "what is kept keeps its value"
    bad = ~kept.any(-1)
    drawn = kept.gather(1, torch.tensor(tokens).unsqueeze(1)).flatten()
    assert torch.equal(drawn, ~bad), "what is drawn was kept"
    return kept, tokens


def stocks(logits, parameters):
    """Return which ids vLLM's filters by sorting keep, bool [rows, vocab]."""
    k = torch.tensor([each.get("top_k", logits.shape[1]) for each in parameters])
    p = torch.tensor([each.get("top_p", 1.0) for each in parameters])
    limits = [
        values if any(name in each for each in parameters) else None for name, values in (("top_k", k), ("top_p", p))
    ]
    return apply_top_k_top_p_pytorch(logits.float().clone(), *limits) > -torch.inf


def assert_near(kept, theirs):
    """Assert that one set holds the other, with fewer than 1 in 200 ids between them, or three at most."""
    assert all(min((a & ~b).sum(), (b & ~a).sum()) == 0 for a, b in zip(kept, theirs, strict=True))
    differing = (kept.sum(-1) - theirs.sum(-1)).abs()
    assert (differing <= torch.clamp(theirs.sum(-1) * 0.005, min=3)).all()


def random_limits(rows, vocab, names):
    """Return limits of random strength; a quarter of the rows have none of a kind."""
    source = generator(1)
    free = torch.rand(rows, generator=source) < 0.25
    k = torch.randint(1, 100, (rows,), generator=source).masked_fill(free, vocab).tolist()
    p = (torch.rand(rows, generator=source) * 0.9 + 0.1).masked_fill(free.roll(1), 1.0).tolist()
    return [{name: {"top_k": k, "top_p": p}[name][row] for name in names} for row in range(rows)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", FILTERS)
def test_kept_sets_are_those_of_vllms_sort(shape, kind):
    """Equal for top_k; with top_p up to the rounding of vLLM's sums."""
    logits = torch.randn(shape, generator=generator())
    parameters = random_limits(*shape, FILTERS[kind])
    kept, _ = ours(logits, parameters)
    theirs = stocks(logits, parameters)
    if kind == "top_k":
        assert torch.equal(kept, theirs)
    assert_near(kept, theirs)


def test_limits_that_limit_nothing_keep_everything():
    logits = torch.randn(32, 1024, generator=generator())
    for parameters in ({}, {"top_k": 1024}, {"top_p": 1.0}, {"top_k": 1024, "top_p": 1.0, "min_p": 0.0}):
        assert ours(logits, parameters)[0].all()


def test_limits_at_their_ends():
    logits = torch.randn(16, 1024, generator=generator())
    for name, values in (("top_k", [1, 1024, 2, 1023]), ("top_p", [0.01, 0.1, 0.9, 1.0])):
        parameters = [{name: values[i % 4]} for i in range(16)]
        kept, _ = ours(logits, parameters)
        assert torch.equal(kept, stocks(logits, parameters))
        assert kept.sum(-1).min() == 1


def test_top_p_of_one_beside_top_k_changes_nothing():
    logits = torch.rand(64, 4096, generator=generator(33))
    parameters = [{"top_k": 1 + i % 9} if i % 2 else {} for i in range(64)]
    with_top_p = [{**each, "top_p": 1.0} for each in parameters]
    first, second = ours(logits, parameters), ours(logits, with_top_p)
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1]
    assert torch.equal(first[0], stocks(logits, parameters))


@each_filter
def test_view_with_gaps_keeps_what_its_copy_keeps(filters):
    backing = torch.full((16, 4104), -1000.0)
    backing[:, :4096] = torch.linspace(10, -10, 4096) + torch.arange(16.0).unsqueeze(1) / 1000
    view = backing[:, :4096]
    assert not view.is_contiguous()
    (kept, tokens), (of_copy, tokens_of_copy) = ours(view, filters), ours(view.contiguous(), filters)
    assert torch.equal(kept, of_copy)
    assert tokens == tokens_of_copy
    assert_near(kept, stocks(view, [filters] * 16))
    assert (backing[:, 4096:] == -1000).all()


@mostly_masked
@each_filter
def test_masked_ids_stay_masked_and_something_is_kept(share, filters):
    """As a grammar leaves rows; beside them rows without a mask."""
    logits = torch.randn(16, 32_000, generator=generator())
    masked = torch.rand(16, 32_000, generator=generator(1)) < share
    masked[1::2] = False
    logits[masked] = -torch.inf
    kept, _ = ours(logits, filters)
    assert not (kept & masked).any()
    assert (kept.sum(-1) >= 1).all()
    assert (kept.sum(-1) <= filters.get("top_k", 32_000)).all()
    assert_near(kept, stocks(logits, [filters] * 16))


@each_filter
def test_row_without_any_id_stays_empty_and_ends_its_request(filters):
    kept, tokens = ours(torch.full((4, 1024), -INFINITY), filters)
    assert not kept.any()
    assert tokens == [STOP] * 4


def test_few_ids_that_a_grammar_leaves():
    logits = torch.full((32, 32_000), -INFINITY)
    for row in logits:
        row[torch.randperm(32_000, generator=generator(2))[:5]] = torch.randn(5, generator=generator(3))
    assert (ours(logits, {"top_k": 50})[0].sum(-1) == 5).all()
    assert (ours(logits, {"top_k": 3})[0].sum(-1) == 3).all()
    assert (ours(logits, {"top_p": 0.9})[0].sum(-1) > 0).all()


@each_filter
@pytest.mark.parametrize("left", [1, 2, 5, 10, 50])
def test_equal_logits_are_kept_by_lowest_id(left, filters):
    """vLLM promises that one survives, and may keep more than k; here it is exactly k, and the shortest nucleus."""
    filters = {**filters, **({"top_k": max(1, left - 1)} if "top_k" in filters else {})}
    logits = torch.full((8, 8192), -INFINITY)
    places = [torch.randperm(8192, generator=generator(row))[:left].sort().values for row in range(8)]
    for row, place in zip(logits, places, strict=True):
        row[place] = 1.0
    size = filters.get("top_k", left)
    size = next(n for n in range(1, size + 1) if n / size >= filters.get("top_p", 1.0))
    for row, place in zip(ours(logits, filters)[0], places, strict=True):
        assert torch.nonzero(row).flatten().tolist() == place[:size].tolist()


def test_nearly_equal_logits_leave_a_nucleus():
    for left in (2, 5, 10):
        logits = torch.full((8, 8192), -INFINITY)
        logits[:, 100 : 100 + left] = 1 + torch.rand(8, left, generator=generator()) * 1e-6
        assert (ours(logits, {"top_p": 0.95})[0].sum(-1) >= 0.95 * left).all()


def test_nucleus_of_a_masked_row_is_taken_though_its_top_k_limits_nothing():
    """In a batch with rows that top_k does limit."""
    logits = torch.full((8, 32_000), -INFINITY)
    logits[:3, torch.randperm(32_000, generator=generator())[:30]] = torch.randn(3, 30, generator=generator(1))
    logits[3:] = torch.randn(5, 32_000, generator=generator(2))
    parameters = [{"top_k": 50, "top_p": 0.5}] * 3 + [{"top_p": 0.9}] * 2 + [{"top_k": 50, "top_p": 0.9}] * 3
    kept, _ = ours(logits, parameters)
    assert_near(kept, stocks(logits, parameters))
    assert (kept[:3].sum(-1) < 30).all()


def test_nucleus_that_ends_within_equal_logits_is_the_same_each_time():
    logits = torch.full((4, 32_000), -INFINITY)
    logits[:, :1000], logits[:, 1000:2000] = 1.0, 0.0
    kept = [ours(logits, {"top_p": 0.5})[0] for _ in range(3)]
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], kept[2])
    size = int(kept[0][0].sum())
    assert kept[0][:, :size].all()
    assert abs(size - int(stocks(logits[:1], [{"top_p": 0.5}]).sum())) <= 1


@pytest.mark.parametrize("vocab", [128, 16_385, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_min_p_keeps_what_reaches_its_share_of_the_best(vocab, dtype):
    """Of each row its own; none and one at the ends; masked, infinite and missing logits beside them."""
    shares = [0.1, 0.0, 1.0, 1e-6, 0.5, 0.9, 0.1, 0.1, 0.3]
    logits = torch.randn(9, vocab, generator=generator()).to(dtype)
    logits[5, :] = 2.0
    logits[6, -1], logits[7, -1], logits[8, : vocab // 2] = INFINITY, NAN, -INFINITY
    kept, _ = ours(logits, [{"min_p": each} for each in shares])
    values = logits.double().nan_to_num(nan=-INFINITY, posinf=INFINITY, neginf=-INFINITY)
    bound = values.amax(-1, keepdim=True) + torch.tensor(shares, dtype=torch.float64).log().unsqueeze(1)
    edge = (values - bound).abs() < 1e-6
    assert torch.equal(kept | edge, (values >= bound) & (values > -torch.inf) | edge)
    assert kept[5].all()
    assert kept[2].sum() == (values[2] == values[2].max()).sum()


def test_min_p_of_a_dominant_id_leaves_that_id_alone():
    logits = torch.full((32, 1024), 0.01)
    logits[:, 0] = 10.0
    kept, tokens = ours(logits, [{"min_p": 0.1 * (i % 2)} for i in range(32)])
    assert (kept[1::2].sum(-1) == 1).all()
    assert kept[::2].all()
    assert set(tokens[1::2]) == {0}
    (processor,) = batch_of([{"min_p": 0.1}]).logitsprocs.argmax_invariant
    assert isinstance(processor, MinPLogitsProcessor), "vLLM's own is in the batch, and ours acts in its place"


PATTERNS = {
    "some NaN": lambda row: row.index_fill(0, torch.randperm(len(row), generator=generator())[:16], NAN),
    "NaN at the top": lambda row: row.index_fill(0, row.topk(32).indices, NAN),
    "all NaN": lambda row: torch.full_like(row, NAN),
    "all +inf": lambda row: torch.full_like(row, INFINITY),
    "all -inf": lambda row: torch.full_like(row, -INFINITY),
    "level": torch.ones_like,
}


@each_filter
@pytest.mark.parametrize("pattern", PATTERNS)
def test_odd_row_gives_an_id_of_the_vocabulary_and_spoils_no_neighbour(pattern, filters):
    logits = torch.randn(8, 32_768, generator=generator()) * 5
    batch = batch_of([{"temperature": 1.0, "seed": i, **filters} for i in range(8)], 32_768)
    odd = logits.clone()
    odd[0] = PATTERNS[pattern](logits[0])
    clean, tokens = draw(logits, batch), draw(odd, batch)
    assert tokens[1:] == clean[1:]
    assert 0 <= tokens[0] < 32_768
    everywhere = torch.stack([PATTERNS[pattern](row) for row in logits])
    assert all(0 <= token < 32_768 for token in draw(everywhere, batch))


@pytest.mark.parametrize(
    ("k", "p"), [(8, None), (16, None), (None, 0.5), (None, 0.7), (None, 0.99), (8, 0.9), (4, 0.5), (None, None)]
)
def test_draws_follow_the_law_that_vllms_filters_leave(k, p):
    """50,000 rows; no id outside the kept set, and goodness of fit at a false alarm of 1e-6."""
    row, rows = torch.randn(1, 32, generator=generator(0)) * 2, 50_000
    metadata = replace(
        detached(rows),
        temperature=torch.ones(rows),
        top_k=None if k is None else torch.full((rows,), k, dtype=torch.int32),
        top_p=None if p is None else torch.full((rows,), p),
    )
    output = GumbelSampler()(row.repeat(rows, 1), metadata)
    law = apply_top_k_top_p_pytorch(
        row.clone(), None if k is None else torch.tensor([k]), None if p is None else torch.tensor([p])
    ).softmax(-1)[0]
    counts = torch.bincount(output.sampled_token_ids.flatten().long(), minlength=32)
    assert_goodness_of_fit(observed=counts.numpy(), probabilities=law.numpy(), claim=f"top_k {k}, top_p {p}")


def test_masked_ids_are_never_drawn_and_a_lone_one_always_is():
    logits = random_logits(120, 20_000)
    logits[:, 1::2] = -INFINITY
    logits[60:] = -INFINITY
    logits[60:, 12_345] = -7.0
    tokens = draw(logits, batch_of([{"temperature": 2.0, "seed": i} for i in range(120)], 20_000))
    assert not any(token % 2 for token in tokens[:60])
    assert set(tokens[60:]) == {12_345}
