"""What is looked at under runner V1, in vLLM's real batch: the rows that were drawn from, and at no token's cost."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from tests.processors import HalveTempered, SpoilLogits
from tests.recording import Counted, make_recorder, total
from tests.test_keys_v1 import KEYED
from tests.test_rows import detached
from tests.test_v1_sampler import BEFORE, STOP, batch_of, mixed, random_logits, spoiled, stock_kernels, tokens_of
from vllm_gumbel import SamplerSettings
from vllm_gumbel.integration import foreign
from vllm_gumbel.integration.speculative import Verifier, expand
from vllm_gumbel.integration.v1 import GumbelSampler
from vllm_gumbel.integration.watch import Watch
from vllm_gumbel.kernels import statistics_reference
from vllm_gumbel.kernels.contract import GREEDY_TEMPERATURE
from vllm_gumbel.kernels.dispatch import Backend
from vllm_gumbel.kernels.slots import as_array
from vllm_gumbel.kernels.statistics import RowStatistics
from vllm_gumbel.metrics import catalogue

__all__ = ["stock_kernels"]  # a fixture that every test here uses

NAN = float("nan")

#: How far the backends may lie from the reference, as `statistics_numba.py` states it: absolute, relative.
TOLERANCES = {
    "kept": (0, 0),
    "log_total": (3e-5, 0),
    "surprisal": (3e-5, 0),
    "entropy": (3e-5, 0),
    "variance": (1e-4, 1e-4),
    "score": (3e-5, 0),
    "log_probability": (3e-5, 0),
    "improbable_mass": (1e-9, 1e-3),
}


def watching(share=1.0, **options):
    """Return a sampler that looks at a share of the rows, and tells a recorder that keeps what it is told."""
    settings = SamplerSettings(watch=share, improbable_below=1e-4)
    return GumbelSampler(settings=settings, recorder=Counted(), **options)


def told(sampler):
    """Return the one step that a sampler has told of; nothing went wrong."""
    ((step, _),) = sampler.recorder.steps
    assert sampler.recorder.faults == []
    return step


def reference(logits, params, tokens, index, usable_vocab=None):
    """Return the statistics of some rows by the definition."""
    return statistics_reference.statistics(
        as_array(logits), params, tokens, index, usable_vocab=usable_vocab, improbable_below=1e-4
    )


def assert_same(found, expected):
    for f in fields(RowStatistics):
        absolute, relative = TOLERANCES[f.name]
        got, wanted = getattr(found, f.name), getattr(expected, f.name)
        np.testing.assert_allclose(got, wanted, rtol=relative, atol=absolute, err_msg=f.name)


def before_the_draw(logits, batch):
    """Return logits as vLLM's own sampler has them once everything that comes before a draw is applied."""
    return Sampler().apply_logits_processors(logits.float().clone(), batch.sampling_metadata, False)


def unseeded_and_random(parameters):
    return [each["temperature"] >= GREEDY_TEMPERATURE and each.get("seed") is None for each in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_every_row_is_seen_as_it_was_drawn(dtype, backend):
    """Tested are those without a seed that are not greedy; ids past the tokenizer's size have no part in a law."""
    rows = mixed(28)
    for seed in range(3):
        logits, batch = random_logits(28, seed=seed, dtype=dtype), batch_of(rows)
        sampler = watching(usable_vocab=290)
        sampler.watch._backend = sampler.backend = Backend(backend, *_draw_of(backend))
        tokens = tokens_of(sampler(logits.clone(), batch.sampling_metadata))
        seen = told(sampler).watched
        assert seen.index.tolist() == list(range(28))
        params = batch.sampling_metadata.rows.params()
        assert_same(seen.statistics, reference(logits, params, np.array(tokens), seen.index, 290))
        assert seen.tested.tolist() == unseeded_and_random(rows)
        assert told(sampler).tokens.tolist() == tokens
    assert len(set(seen.statistics.kept)) > 5, "the filters leave different numbers of ids"


def _draw_of(backend):
    from vllm_gumbel.kernels import dispatch

    chosen = dispatch.choose(backend)
    return chosen.draw, chosen.reason


@pytest.mark.parametrize("plain", [0, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_edited_are_seen_as_they_are_after_it(dtype, plain):
    """Whether most rows of a batch are edited, so that it is copied, or some; each row is seen once."""
    rows = [{"temperature": 1.0, "top_p": 0.9}] * plain
    for i, each in enumerate(BEFORE):
        rows.insert(3 * i, each)
    logits, batch = random_logits(len(rows), dtype=dtype), batch_of(rows)
    logits[:, [STOP, 3, 12, 30, 40, 50]] = 8.0  # ids that the edits are about
    sampler = watching()
    tokens = np.array(tokens_of(sampler(logits.clone(), batch.sampling_metadata)))
    seen = told(sampler).watched
    assert seen.index.tolist() == list(range(len(rows)))
    params = batch.sampling_metadata.rows.params()
    edited = before_the_draw(logits, batch)
    assert_same(seen.statistics, reference(edited, params, tokens, seen.index))
    assert seen.tested.tolist() == unseeded_and_random(rows)
    raw = reference(logits, params, tokens, seen.index)
    assert (np.abs(raw.log_total - seen.statistics.log_total) > 0.01).sum() >= 6, "the edits matter"


def test_rows_of_other_packages_processors_are_seen_after_them():
    """What is left to the draw are logits that are tempered already."""
    rows = [{**each, "extra_args": {"halve": i % 3 > 0}} for i, each in enumerate(mixed(28))]
    logits, batch = random_logits(28), batch_of(rows, custom=[HalveTempered])
    sampler = watching()
    tokens = np.array(tokens_of(sampler(logits.clone(), batch.sampling_metadata)))
    seen, params = told(sampler).watched, batch.sampling_metadata.rows.params()
    hot = np.where([i % 3 > 0 for i in range(28)], params.temperature * 2, params.temperature)
    # min_p comes before the other package's, so with the temperature as it was
    kept = foreign.apply(logits.clone(), params, batch.sampling_metadata.logitsprocs.argmax_invariant)[0]
    masked = torch.where(kept == -torch.inf, -torch.inf, logits)
    expected = reference(
        masked, replace(params, temperature=hot.astype(np.float32), min_p=params.min_p * 0), tokens, seen.index
    )
    for name in ("kept", "surprisal", "entropy", "variance", "score"):
        absolute, relative = TOLERANCES[name]
        got = getattr(seen.statistics, name)
        np.testing.assert_allclose(got, getattr(expected, name), rtol=relative, atol=absolute, err_msg=name)
    assert seen.tested.tolist() == unseeded_and_random(rows)
    spoil = [{"temperature": 1.0, "extra_args": {"spoil": "some_nan"}}] * 4
    logits, batch = random_logits(4), batch_of(spoil, custom=[SpoilLogits])
    sampler = watching()
    tokens_of(sampler(logits.clone(), batch.sampling_metadata))
    assert told(sampler).watched.statistics.kept.tolist() == [150] * 4


def test_rows_with_keys_are_tested_where_the_law_of_the_race_is_theirs():
    """Not while hybrid or scaled; vLLM's own rows, by vLLM's token, unless ties at the k-th id may be kept there."""
    rows = [{"temperature": 0.8, "extra_args": each} for each in KEYED]
    rows += [{"temperature": 0.8, "extra_args": {"gumbel_hybrid_steps": 2}, "output": [5, 6]}]
    rows += [{"temperature": 0.8, "top_k": k, "extra_args": {"gumbel_sampler": "default"}} for k in (5, 300)]
    rows += [{"temperature": 0.0, "extra_args": {"gumbel_sampler": "default"}}, {"temperature": 1.0}]
    expected = [False, False, True, True, True, True, True, False, True, False, True]
    for more in (0, 30):  # the odd rows are copied, or the whole batch
        batch, logits = batch_of([*rows, *[{"temperature": 1.0, "seed": 1}] * more]), random_logits(len(rows) + more)
        sampler = watching()
        tokens = np.array(tokens_of(sampler(logits.clone(), batch.sampling_metadata)))
        step = told(sampler)
        assert step.watched.tested.tolist() == expected + [False] * more
        assert np.flatnonzero(step.by_stock).tolist() == [5, 7, 8, 9]
        unchanged = np.array([i for i in range(len(rows) + more) if i != 2])  # 2 has a tail of its own
        part = step.watched.take(np.isin(step.watched.index, unchanged), unchanged)
        params = batch.sampling_metadata.rows.params()
        assert_same(part.statistics, reference(logits, params, tokens, unchanged))
        assert np.isfinite(step.watched.statistics.surprisal[2])
        assert step.watched.statistics.log_total[2] != pytest.approx(
            reference(logits, params, tokens, np.array([2])).log_total[0], abs=1e-3
        )


def test_rows_that_cannot_be_drawn_have_no_law_and_their_neighbours_have():
    bad, _ = spoiled(random_logits(19))
    batch = batch_of([{"temperature": 0.8}] * 19)
    sampler = watching()
    tokens = np.array(tokens_of(sampler(bad.clone(), batch.sampling_metadata)))
    seen = told(sampler).watched
    assert_same(seen.statistics, reference(bad, batch.sampling_metadata.rows.params(), tokens, seen.index))
    lawless = ~np.isfinite(torch.where(bad.isnan(), -torch.inf, bad).max(dim=1).values.numpy())
    assert lawless.sum() == 6
    assert ((seen.statistics.kept == 0) == lawless).all()


def test_rows_of_drafts_are_seen_with_the_drafts_before_them():
    """Every row of a step, each as if its drafts had been generated; of these those are counted that are sent."""
    rows = [{"temperature": 0.8, "presence_penalty": 1.5, "output": [5]}, {"temperature": 1.0, "seed": 3}]
    rows += [{"temperature": 0.7, "top_k": 9}, {"temperature": 0.9, "extra_args": {"gumbel_hybrid_steps": 2}}]
    drafts = [[7, 7], [], [1, 2, 3], [4, 4]]
    request, offset = np.repeat(range(4), [3, 1, 4, 3]), np.array([0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 2])
    logits, batch = random_logits(11), batch_of(rows)
    sampler = watching()
    metadata = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    output = Verifier(sampler)(metadata, None, logits.clone(), batch.sampling_metadata).sampled_token_ids
    ((step, sent),) = sampler.recorder.steps
    seen = step.watched
    assert seen.index.tolist() == list(range(11))
    edited = logits.clone()
    edited[:3, 5] -= 1.5
    edited[1:3, 7] -= 1.5
    params = expand(batch.sampling_metadata.rows.params(), request, offset)
    assert_same(seen.statistics, reference(edited, params, step.tokens, seen.index))
    assert seen.tested.tolist() == [True] * 3 + [False] + [True] * 4 + [False, False, True]
    assert step.slots.tolist() == batch.sampling_metadata.rows.slot[request].tolist()
    assert sent.sum() == (output >= 0).sum()
    assert len(step.only(sent).watched.index) == sent.sum() < 11


def test_draws_that_are_discarded_are_not_counted(tmp_path):
    batch, logits = batch_of([{"temperature": 1.0}] * 12), random_logits(12)
    sampler = GumbelSampler(settings=SamplerSettings(watch=1), recorder=make_recorder(tmp_path))
    sampler._discarded = lambda: np.arange(12) < 5
    for _ in range(3):
        sampler(logits.clone(), batch.sampling_metadata)
    assert total(tmp_path, catalogue.WATCHED_TOKENS) == total(tmp_path, catalogue.TESTED_TOKENS) == 21
    assert total(tmp_path, catalogue.SCORE_PAIRS) == 3 * 7 * 6
    assert total(tmp_path, catalogue.REQUESTS) == 12
    assert total(tmp_path, catalogue.SAMPLER_SECONDS, "_count") == 3
    assert total(tmp_path, catalogue.FAULTS) == 0


MIXTURES = {
    "plain": (mixed(21), ()),
    "edited": (BEFORE * 2, ()),
    "some edited": ([*mixed(28), *BEFORE[3:6]], ()),
    "keys": ([{"temperature": 0.8, "seed": i, "extra_args": each} for i, each in enumerate(KEYED[:5] * 3)], ()),
    "processors": ([{**each, "extra_args": {"halve": True}} for each in mixed(14)], [HalveTempered]),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_looking_changes_no_token(name):
    """Unseeded requests too: their seeds do not depend on it. 60 batches each, a third of them with bad rows."""
    rows, custom = MIXTURES[name]
    batches = [batch_of(rows, custom=custom) for _ in range(3)]
    samplers = [watching(share) for share in (0, 1.0, 0.4)]
    different = set()
    for seed in range(20):
        logits = random_logits(len(rows), seed=seed, dtype=(torch.float32, torch.bfloat16)[seed % 2])
        if seed % 3 == 0:
            logits, _ = spoiled(logits)
        drawn = []
        for sampler, batch in zip(samplers, batches, strict=True):
            given = logits.clone()
            drawn.append(tokens_of(sampler(given, batch.sampling_metadata)))
            assert custom or torch.equal(given.nan_to_num(1e9), logits.nan_to_num(1e9)), "nor a logit"
        assert drawn[0] == drawn[1] == drawn[2]
        different.add(tuple(drawn[0]))
    assert len(different) > 10
    assert [bool(sampler.recorder.faults) for sampler in samplers] == [False] * 3
    watched = [sum(len(step.watched.index) for step, _ in each.recorder.steps if step.watched) for each in samplers]
    assert watched[0] == 0 < watched[2] < watched[1] == 20 * len(rows)


class Broken(Backend):
    """A backend whose statistics fail."""

    def statistics(self, *arguments, **keywords):
        """Fail."""
        raise MemoryError("planted")


@pytest.mark.parametrize("name", MIXTURES)
def test_statistics_that_fail_cost_a_fault_and_nothing_else(name):
    rows, custom = MIXTURES[name]
    logits, batch = random_logits(len(rows)), batch_of(rows, custom=custom)
    sampler = watching()
    expected = tokens_of(watching(0)(logits.clone(), batch.sampling_metadata))
    sampler.watch = Watch(sampler.settings, Broken(*vars(sampler.backend).values()), None)
    assert tokens_of(sampler(logits.clone(), batch.sampling_metadata)) == expected
    assert {(part, str(error)) for part, error in sampler.recorder.faults} == {("exactness", "planted")}
    ((step, _),) = sampler.recorder.steps
    assert step.watched is None
    assert step.tokens.tolist() == expected


def test_nothing_is_looked_at_where_nothing_counts_it():
    """Without metrics, with a share of 0, and for rows of no batch, as in vLLM's profiling run."""
    batch, logits = batch_of(mixed(14)), random_logits(14)
    for sampler in (GumbelSampler(settings=SamplerSettings(watch=1)), watching(0), watching()):
        sampler.watch._backend = Broken(*vars(sampler.backend).values())
        if sampler.settings.watch and sampler.recorder:
            sampler(random_logits(4), detached(4))
            assert sampler.recorder.steps == []
        else:
            sampler(logits.clone(), batch.sampling_metadata)
        assert sampler.recorder is None or sampler.recorder.faults == []


def test_the_share_of_rows_is_the_one_that_is_set():
    """40,000 rows at shares of 1/8 and 0.9: within 5 standard deviations (false alarm 6e-7).

    That catches a share that is 0.009 off, and one of pairs that is 0.014 off.
    Whether a row is chosen depends on no other: pairs of neighbours are both chosen with the square of the share.
    """
    for share in (0.125, 0.9):
        watch = watching(share).watch
        watch._generator = np.random.default_rng(5)
        chosen = np.zeros(40_000, bool)
        chosen[watch.choose(40_000)] = True
        pairs = chosen[::2] & chosen[1::2]
        for found, p in ((chosen, share), (pairs, share**2)):
            assert abs(found.mean() - p) < 5 * (p * (1 - p) / len(found)) ** 0.5
    assert watching(1.0).watch.choose(7).tolist() == list(range(7))


@pytest.mark.parametrize(("heat", "shared"), [(1.0, False), (1.08, False), (1.0, True)])
def test_sums_over_many_steps_show_an_exact_sampler_and_convict_others(tmp_path, heat, shared):
    """150 steps of 40 unseeded rows: (surprisal - entropy) / sqrt(variance) is N(0, 1), and the scores are uniform.

    |z| < 5: false alarm 6e-7; draws 8% too hot give 9. The 20 bins: chi-square below 70, its quantile at 1 - 1e-7 for
    19 degrees of freedom. Pairs of scores within a step, whose sum is nearly a chi-square of 150: below 7 standard
    deviations, false alarm 5e-9; rows that share their noise give more, and so would scores correlated by 3%.
    """
    rows = [{"temperature": 0.9}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 0.9, "top_k": 40}] * 13
    rows.append({"temperature": 0.9, "presence_penalty": 1.0, "output": [4]})
    batch, recorder = batch_of(rows), make_recorder(tmp_path, slots=40)
    sampler = GumbelSampler(settings=SamplerSettings(watch=1), recorder=recorder)
    draw = sampler.backend.draw

    def hot(logits, params, **keywords):
        return draw(logits, replace(params, temperature=params.temperature * np.float32(heat)), **keywords)

    sampler.backend = replace(sampler.backend, draw=hot)
    if shared:
        batch.sampling_metadata.rows.seed[:] = 1
        batch.num_tokens_no_spec[:] = 4
    for step in range(150):
        batch.num_tokens_no_spec += 1
        sampler(random_logits(40, seed=step), batch.sampling_metadata)
    surprisal, entropy, variance, tested, squares, steps, pairs = (
        total(tmp_path, metric)
        for metric in (
            catalogue.SURPRISAL,
            catalogue.ENTROPY,
            catalogue.SURPRISAL_VARIANCE,
            catalogue.TESTED_TOKENS,
            catalogue.SCORE_SQUARES,
            catalogue.SCORE_STEP_SQUARES,
            catalogue.SCORE_PAIRS,
        )
    )
    outside = total(tmp_path, catalogue.ANOMALOUS_TOKENS, kind="outside_filter")
    assert tested + outside == 6000
    assert total(tmp_path, catalogue.FAULTS) == 0
    assert (abs(surprisal - entropy) / variance**0.5 < 5) == (outside == 0) == (heat == 1)
    assert ((steps - squares) / (2 * pairs) ** 0.5 < 7) == (not shared)
    if heat == 1 and not shared:
        assert pairs == 150 * 40 * 39
        bins = np.array([total(tmp_path, catalogue.SCORE_PIT, bin=str(bin)) for bin in range(20)])
        assert bins.sum() == 6000
        assert ((bins - 300) ** 2 / 300).sum() < 70
