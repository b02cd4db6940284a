"""Keys in vLLM's real batch under runner V1: what they cost others, what is counted, and vLLM's own sampler per row."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import InputBatch

from tests.recording import Counted
from tests.test_rows import append, filled, make_batch, make_request, parameters
from tests.test_v1_sampler import MODES, STOP, batch_of, mixed, random_logits, tokens_of
from vllm_gumbel import SamplerSettings
from vllm_gumbel.integration import keys, stock
from vllm_gumbel.integration.rows import SeedSource
from vllm_gumbel.integration.v1 import GumbelSampler
from vllm_gumbel.kernels.contract import Flag

NAN = float("nan")

#: A key of every kind that needs work at each draw.
KEYED = [
    {"gumbel_hybrid_steps": 9},
    {"gumbel_noise_scale": 0.5},
    {"gumbel_tail_boost": 0.5},
    {"gumbel_repetition_offset": 2.0},
    {"gumbel_top_n": 5},
    {"gumbel_sampler": "default"},
]

#: Keys that only set parameters.
SETTLED = [
    {"gumbel_sampler": "gumbel", "gumbel_noise_scale": 1, "gumbel_hybrid_steps": 0, "gumbel_tail_boost": 0},
    {"gumbel_salt": 4, "gumbel_return_info": True},
    {"gumbel_preset": "factual", "gumbel_temperature_rule": "log_vocab", "gumbel_repetition_offset": 0},
]


@pytest.fixture(scope="module", autouse=True)
def stock_kernels():
    """Stock's own draw needs what a worker loads."""
    current_platform.import_kernels()


@pytest.fixture
def calls(monkeypatch):
    """The names of the functions for rows with keys, as often as they are called."""
    called = []

    def counting(module, name):
        original = getattr(module, name)

        def replacement(*arguments, **keywords):
            called.append(name)
            return original(*arguments, **keywords)

        monkeypatch.setattr(module, name, replacement)

    for name in ("places", "edit", "redraw", "given_up"):
        counting(keys, name)
    counting(stock, "draw")
    return called


@pytest.mark.parametrize("rows", [mixed(28), [{"temperature": 1.0, "extra_args": each} for each in SETTLED * 9]])
@pytest.mark.parametrize("mode", MODES)
def test_batch_in_which_no_key_acts_on_rows_does_no_work_for_keys(calls, rows, mode):
    """Not one call, in any mode; and one more row with a key makes the calls, so that they would have been seen."""
    logits = random_logits(len(rows) + 1)
    for wanted in (None, 3):
        batch = batch_of(rows)
        GumbelSampler(logprobs_mode=mode)(
            logits[:-1].clone(), replace(batch.sampling_metadata, max_num_logprobs=wanted)
        )
        assert batch.sampling_metadata.rows.keyed == []
        assert calls == []
    batch = batch_of([*rows, {"temperature": 1.0, "extra_args": KEYED[0]}])
    GumbelSampler(logprobs_mode=mode)(logits.clone(), batch.sampling_metadata)
    assert {"places", "edit", "redraw", "given_up"} <= set(calls)


@pytest.mark.parametrize("key", KEYED)
def test_rows_without_keys_are_drawn_as_if_the_others_were_not_there(key):
    logits = random_logits(21)
    rows = [{"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": i} for i in range(21)]
    alone = tokens_of(GumbelSampler()(logits.clone(), batch_of(rows).sampling_metadata))
    for every in (2, 7):
        some = [{**row, "extra_args": key} if i % every == 0 else row for i, row in enumerate(rows)]
        drawn = tokens_of(GumbelSampler()(logits.clone(), batch_of(some).sampling_metadata))
        assert [drawn[i] for i in range(21) if i % every] == [alone[i] for i in range(21) if i % every]


def test_settled_parameters_are_those_of_the_batch_and_survive_preemption():
    """The request's own parameters stay what the client gave."""
    keyed = {"gumbel_preset": "factual", "gumbel_temperature_rule": "log_vocab", "gumbel_top_n": 6}
    request = make_request("a", temperature=1.0, top_k=9, extra_args=keyed)
    batch = filled([request, make_request("b", temperature=0, extra_args={"gumbel_temperature_rule": "log_vocab"})])
    for _ in range(2):
        rows = dict(zip(batch.req_ids, parameters(batch), strict=True))
        assert rows["a"]["temperature"] == pytest.approx(0.7 * (1 + 0.1 * np.log(50)), rel=1e-6)
        assert rows["a"]["top_k"] == 6
        assert rows["b"]["temperature"] == 0
        assert (request.sampling_params.temperature, request.sampling_params.top_k) == (1.0, 9)
        batch.remove_request("a")
        batch.condense()
        batch.refresh_metadata()
        batch.add_request(request)
        batch.refresh_metadata()


def test_generated_tokens_reach_the_offset_though_nothing_else_asks_for_them():
    """vLLM hands them out only where penalties or processors need them."""
    request = make_request("a", temperature=0, output=[4, 4, 4], extra_args={"gumbel_repetition_offset": 3.0})
    batch = make_batch(rows=2)
    batch.add_request(request)
    batch.refresh_metadata()
    assert batch.sampling_metadata.output_token_ids == [[4, 4, 4]]
    logits = torch.zeros(1, 50)
    logits[0, 4], logits[0, 9] = 10.0, 0.5
    assert tokens_of(GumbelSampler()(logits.clone(), batch.sampling_metadata)) == [4]
    append(batch, {"a": request}, 4)
    assert tokens_of(GumbelSampler()(logits.clone(), batch.sampling_metadata)) == [9], "four copies cost 12"
    batch.remove_request("a")
    batch.condense()
    batch.add_request(make_request("b", temperature=0))
    batch.refresh_metadata()
    assert batch.sampling_metadata.output_token_ids == []


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_of_rows_with_keys(mode):
    """Raw ones are of the logits as they came; processed ones of what was drawn from, and vLLM's for vLLM's rows."""
    rows = [
        {"temperature": 0.7, "top_k": 12, "min_p": 1e-5, "seed": i, "extra_args": each} for i, each in enumerate(KEYED)
    ]
    rows = [{**row, "generator": torch.Generator().manual_seed(i)} for i, row in enumerate(rows)]
    plain = [{key: value for key, value in row.items() if key != "extra_args"} for row in rows]
    logits = random_logits(len(rows))
    keyed, without = (replace(batch_of(each).sampling_metadata, max_num_logprobs=-1) for each in (rows, plain))
    ours = GumbelSampler(logprobs_mode=mode)(logits.clone(), keyed)
    theirs = Sampler(logprobs_mode=mode)(logits.clone(), without)
    values, reference = ours.logprobs_tensors.logprobs, theirs.logprobs_tensors.logprobs
    unchanged = range(6) if mode.startswith("raw") else (0, 1, 3, 5)  # 2 changes logits, 4 keeps fewer of them
    for i in unchanged:
        assert torch.equal(values[i], reference[i]), i
    if mode.startswith("processed"):
        assert not torch.equal(values[2], reference[2])
        assert (values[4] > -torch.inf).sum() == 5
        drawn = torch.tensor(tokens_of(ours)).unsqueeze(1)
        assert (values.gather(1, drawn) > -torch.inf).all()


def pair_of_batches(rows):
    """Return our batch and vLLM's with the same requests, by name, each with generators of its own."""
    processors = [batch_of([]).logitsprocs for _ in range(2)]
    ours = make_batch(rows=8, vocabulary=300, processors=processors[0])
    theirs = make_batch(InputBatch, rows=8, vocabulary=300, processors=processors[1])
    states = []
    for batch in (ours, theirs):
        found = {}
        for i, row in enumerate(rows):
            found[f"{i}"] = make_request(f"{i}", seed=i, generator=torch.Generator().manual_seed(i), **row)
            batch.add_request(found[f"{i}"])
        batch.refresh_metadata()
        states.append(found)
    return ours, theirs, states


STOCK_ROWS = [
    {"temperature": 0.9},
    {"temperature": 0.0},
    {"temperature": 1.5, "top_k": 20, "min_p": 0.05},
    {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 1.0, "logit_bias": {5: 3.0}, "min_tokens": 3, "stop": STOP},
]


def test_rows_of_vllms_sampler_get_the_tokens_of_vllm():
    """Seeded requests, 12 steps, with edits, next to rows of ours; one is preempted and comes back."""
    rows = [{**row, "extra_args": {"gumbel_sampler": "default"}} for row in STOCK_ROWS]
    ours, theirs, states = pair_of_batches([*rows, {"temperature": 1.0}])
    sampler, reference = GumbelSampler(), Sampler()
    ours.remove_request("5")  # ours goes back in under another row
    ours.condense()
    ours.add_request(states[0]["5"])
    ours.refresh_metadata()
    seen = set()
    for step in range(12):
        if step == 6:
            for batch, found in ((ours, states[0]), (theirs, states[1])):
                batch.remove_request("0")
                batch.condense()
                batch.refresh_metadata()
                batch.add_request(found["0"])
                batch.refresh_metadata()
        logits = {name: random_logits(1, seed=100 * step + int(name)) for name in states[0]}
        drawn = []
        for batch, draw in ((ours, sampler), (theirs, reference)):
            given = torch.cat([logits[name] for name in batch.req_ids])
            drawn.append(dict(zip(batch.req_ids, tokens_of(draw(given, batch.sampling_metadata)), strict=True)))
        for name in map(str, range(5)):
            assert drawn[0][name] == drawn[1][name], (step, name)
        seen.add(drawn[0]["0"])
        for batch, found in ((ours, states[0]), (theirs, states[1])):
            for row, name in enumerate(batch.req_ids):
                batch.num_tokens_no_spec[row] += 1
                found[name].output_token_ids.append(drawn[1][name])
    assert len(seen) > 6


def test_discarded_rows_do_not_move_a_generator_on():
    """A prompt in chunks gives the tokens of one in a piece; stock's engine dies of it on a CPU."""
    discarded = np.array([True])
    logits, tokens = random_logits(1), []
    for chunks in (0, 3):
        generator = torch.Generator().manual_seed(3)
        row = {"temperature": 1.0, "seed": 3, "generator": generator, "extra_args": {"gumbel_sampler": "default"}}
        batch, sampler = batch_of([row]), GumbelSampler()
        sampler._discarded = lambda: discarded
        discarded[:] = True
        for _ in range(chunks):
            sampler(logits.clone(), batch.sampling_metadata)
        discarded[:] = False
        tokens.append([tokens_of(sampler(logits.clone(), batch.sampling_metadata)) for _ in range(5)])
    assert tokens[0] == tokens[1]
    assert len({token for (token,) in tokens[0]}) > 1


def test_unseeded_rows_of_vllms_sampler_differ():
    rows = [{"temperature": 2.0, "extra_args": {"gumbel_sampler": "default"}}] * 30
    logits = random_logits(1).div(3).repeat(30, 1)
    assert len(set(tokens_of(GumbelSampler()(logits, batch_of(rows).sampling_metadata)))) > 5


@pytest.mark.parametrize(("policy", "token"), [("stop", STOP), ("lowest", 0)])
def test_bad_rows_with_keys_follow_the_policy_and_padded_ids_stay_out(policy, token):
    """vllm#22881, vllm#13175: also for rows that are drawn in another way."""
    rows = [{"temperature": 1.0, "seed": i, "extra_args": each} for i, each in enumerate(KEYED[:5] * 4)]
    logits = random_logits(20)
    logits[:5], logits[5:10, 280:], logits[10:15, :100] = NAN, 60.0, NAN
    counted = Counted()
    sampler = GumbelSampler(settings=SamplerSettings(on_bad_row=policy), usable_vocab=280, recorder=counted)
    drawn = tokens_of(sampler(logits, batch_of(rows).sampling_metadata))
    assert drawn[:5] == [token] * 5
    assert max(drawn) < 280
    assert min(drawn[10:15]) >= 100
    ((step, _),) = counted.steps
    flags = step.flags.tolist()
    assert [bool(flag & Flag.NO_CANDIDATE) for flag in flags] == [True] * 5 + [False] * 15
    assert [bool(flag & Flag.NONFINITE) for flag in flags] == [i < 5 or 10 <= i < 15 for i in range(20)]


@pytest.mark.parametrize("others", [0, 20])
def test_mass_given_up_and_rows_of_vllms_sampler_are_counted_where_they_are_sent(others):
    rows = [{"temperature": t, "extra_args": {"gumbel_top_n": n}} for t, n in ((0.8, 3), (1.5, 10), (0, 3), (1.0, 500))]
    rows += [{"temperature": 1.0, "extra_args": {"gumbel_sampler": "default"}}] * 2 + [{"temperature": 1.0}] * others
    logits, counted = random_logits(len(rows)), Counted()
    sampler = GumbelSampler(recorder=counted)
    sampler(logits.clone(), batch_of(rows).sampling_metadata)
    expected = []
    for row, t, n in ((0, 0.8, 3), (1, 1.5, 10)):
        mass = (logits[row].double() / t).softmax(-1).sort(descending=True).values
        expected.append(float(mass[n:].sum()))
    ((step, sent),) = counted.steps
    assert sent is None
    assert step.given_up[:4] == pytest.approx([*expected, NAN, 0.0], rel=1e-6, nan_ok=True)
    assert np.isnan(step.given_up[4:]).all()
    assert np.flatnonzero(step.by_stock).tolist() == [4, 5]
    sampler._discarded = lambda: np.arange(len(rows)) % 4 == 0
    sampler(logits.clone(), batch_of(rows).sampling_metadata)
    step, sent = counted.steps[-1]
    assert sent.tolist() == [row % 4 != 0 for row in range(len(rows))]
    part = step.only(sent)
    assert part.given_up[~np.isnan(part.given_up)] == pytest.approx([expected[1], 0.0], rel=1e-6)
    assert np.flatnonzero(part.by_stock).tolist() == [sum(sent[:5])]
    assert np.flatnonzero(step.by_stock).tolist() == [5], "vLLM's sampler draws no row that is discarded"
    assert counted.faults == []


def test_seed_of_an_unseeded_request_is_logged_and_replays_it(caplog):
    source = SeedSource(7, 0)
    logger = logging.getLogger("vllm.gumbel")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG, "vllm.gumbel"):
            unseeded = [make_request("quiet", temperature=1.0), make_request("asks", temperature=1.0)]
            unseeded[1].sampling_params.extra_args = {"gumbel_return_info": True, "gumbel_salt": 5}
            batch = filled(unseeded, vocabulary=300, seeds=SeedSource(7, 0))
    finally:
        logger.removeHandler(caplog.handler)
    source.next()
    seed = source.next()
    said = {record.getMessage() for record in caplog.records}
    assert said == {f"vllm-gumbel: request asks draws with seed {seed} and salt 5"}
    logits = random_logits(2)
    replay = filled([make_request("again", temperature=1.0, seed=seed, extra_args={"gumbel_salt": 5})], vocabulary=300)
    drawn = tokens_of(GumbelSampler()(logits.clone(), batch.sampling_metadata))
    assert tokens_of(GumbelSampler()(logits[1:].clone(), replay.sampling_metadata)) == drawn[1:]
