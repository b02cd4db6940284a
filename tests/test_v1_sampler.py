"""The sampler on CPU tensors, inside vLLM's real batch: the reference's tokens, and stock's everything else."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.sample.sampler import Sampler

from tests.processors import HalveTempered, SpoilLogits
from tests.test_rows import filled, make_request
from vllm_gumbel import SamplerSettings
from vllm_gumbel.integration.v1 import GumbelSampler
from vllm_gumbel.kernels import sample_reference

NAN, INFINITY, STOP = float("nan"), float("inf"), 7
MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]

#: Parameters of neighbours; every kind of row.
MIXED = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_k": 5, "seed": 3},
    {"temperature": 0.5, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1, "seed": 2**64 - 1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.7, "min_p": 0.01, "extra_args": {"gumbel_salt": 9}},
    {"temperature": 2.0, "top_k": 10**6, "seed": 0},
]


@pytest.fixture(scope="module", autouse=True)
def stock_kernels():
    """Stock's own draw needs what a worker loads."""
    current_platform.import_kernels()


@pytest.fixture(scope="module")
def real_logits(model_path):
    """Logits of the default model, float32 [40, 49152], one row for each of the last tokens of a text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "The sky over the harbour was grey. She counted: one, two, three. In 1969 the first people walked on " * 2
    ids = AutoTokenizer.from_pretrained(model_path)(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)(ids).logits[0, -40:].clone()


def random_logits(rows, vocabulary=300, seed=0, dtype=torch.float32):
    return (torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def batch_of(parameters, vocabulary=300, custom=()):
    """Return a batch with vLLM's logits processors and `custom` ones; `bad_ids` are sequences not to be drawn."""
    processors = build_logitsprocs(VllmConfig(), torch.device("cpu"), False, False, custom)
    requests = []
    for i, each in enumerate(parameters):
        each = {"prompt": range(1, 3 + i % 5), "stop": STOP, **each}
        bad_ids = each.pop("bad_ids", None)
        requests.append(make_request(f"request {i}", **each))
        requests[-1].sampling_params._bad_words_token_ids = bad_ids
    return filled(requests, vocabulary=vocabulary, processors=processors)


def mixed(rows):
    return [MIXED[i % len(MIXED)] for i in range(rows)]


def tokens_of(output):
    assert output.sampled_token_ids.dtype == torch.int32
    return output.sampled_token_ids.flatten().tolist()


def draw(logits, batch, **settings):
    """Return the tokens that the sampler draws; it may write into the logits that it is given."""
    return tokens_of(GumbelSampler(settings=SamplerSettings(**settings))(logits.clone(), batch.sampling_metadata))


def expected(logits, batch, **changed):
    """Return the tokens of the definition for the same rows; `changed` replaces parameters."""
    params = replace(batch.sampling_metadata.rows.params(), **changed)
    return sample_reference.draw(logits.float().numpy(), params).tokens.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1, 7, 300, 1025])
def test_tokens_are_the_definitions(dtype, vocabulary):
    batch = batch_of(mixed(28), vocabulary)
    for seed in range(3):
        logits = random_logits(28, vocabulary, seed, dtype)
        assert draw(logits, batch) == expected(logits, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_on_the_default_models_logits_are_the_definitions(real_logits, dtype):
    logits = real_logits.to(dtype)
    batch = batch_of(mixed(len(logits)), logits.shape[1])
    tokens = draw(logits, batch)
    assert tokens == expected(logits, batch)
    assert len(set(tokens)) > 10


def test_logits_may_be_a_view_with_gaps():
    """vllm#42684"""
    wide, batch = random_logits(14, 320), batch_of(mixed(14))
    assert wide[:, :300].stride() == (320, 1)
    assert draw(wide[:, :300], batch) == draw(wide[:, :300].contiguous(), batch)
    tokens = tokens_of(GumbelSampler()(wide.clone()[:, :300], batch.sampling_metadata))
    assert tokens == expected(wide[:, :300], batch)


@pytest.mark.parametrize("parameters", [MIXED[2], MIXED[6], {"temperature": 0.7, "top_p": 0.95, "seed": 42}])
def test_seeded_row_is_the_same_alone_and_at_every_place_among_thirty_others(parameters):
    """vllm#51226, vllm#17524: whatever the other rows, their parameters and the row's index."""
    for trial in range(3):
        row = random_logits(1, seed=100 + trial)
        mine = {**parameters, "prompt": range(trial + 2)}
        (alone,) = draw(row, batch_of([mine]))
        for place in range(31):
            others, params = random_logits(30, seed=place), mixed(30)
            logits = torch.cat([others[:place], row, others[place:]])
            assert draw(logits, batch_of([*params[:place], mine, *params[place:]]))[place] == alone


def test_seeded_row_of_the_default_model_is_the_same_alone_and_among_thirty_others(real_logits):
    mine = {"temperature": 1.0, "top_p": 0.95, "seed": 42}
    for row, place in ((3, 0), (17, 15), (38, 30)):
        params = mixed(30)
        logits = torch.cat([real_logits[:place], real_logits[row : row + 1], real_logits[place:30]])
        together = draw(logits, batch_of([*params[:place], mine, *params[place:]], 49152))
        assert [together[place]] == draw(real_logits[row : row + 1], batch_of([mine], 49152))


def test_greedy_rows_are_stocks(real_logits):
    """Also with ties: many logits of bfloat16 are equal, and the lowest id wins."""
    ties = torch.randint(0, 3, (14, 300), generator=torch.Generator().manual_seed(0)).float()
    for logits in (random_logits(14), ties, real_logits[:14].bfloat16(), real_logits[:14].half()):
        for params in ([{"temperature": 0}] * 14, mixed(14)):
            batch = batch_of(params, logits.shape[1])
            greedy = [i for i, each in enumerate(params) if each["temperature"] == 0]
            stock, ours = tokens_of(Sampler()(logits.clone(), batch.sampling_metadata)), draw(logits, batch)
            largest = logits[greedy].float().argmax(-1).tolist()
            assert [ours[i] for i in greedy] == [stock[i] for i in greedy] == largest


#: What a request may ask for that acts before the draw.
BEFORE = [
    {"temperature": 1.0},
    {"temperature": 0.5, "allowed_token_ids": [3, 4, 5, STOP, 200], "seed": 1},
    {"temperature": 0, "allowed_token_ids": [8, 9]},
    {"temperature": 1.25, "bad_ids": [[11], [2, 12], [9, 13]], "output": [5, 2]},
    {"temperature": 1.0, "logit_bias": {3: 8.0, 250: -100.0}},
    {"temperature": 0.7, "min_tokens": 4, "output": [1], "stop_token_ids": [30, 31]},
    {"temperature": 0.7, "min_tokens": 1, "output": [1], "stop_token_ids": [30, 31]},
    {"temperature": 1.5, "repetition_penalty": 1.3, "prompt": [1, 2, 3], "output": [40, 41, 40]},
    {"temperature": 0.9, "frequency_penalty": 0.5, "presence_penalty": -0.7, "output": [40, 41, 40]},
    {"temperature": 0, "repetition_penalty": 0.5, "presence_penalty": 1.0, "output": [50], "logit_bias": {50: 1}},
    {"temperature": 2.0, "min_p": 0.2},
]


def processed(sampler, logits, batch):
    metadata = replace(batch.sampling_metadata, max_num_logprobs=-1)
    output = sampler(logits.clone(), metadata)
    return tokens_of(output), output.logprobs_tensors.logprobs


@pytest.mark.parametrize("mode", ["processed_logits", "processed_logprobs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_before_the_draw_is_stocks(mode, dtype):
    """Masks, bad words, bias, minimum lengths, penalties and temperature give stock's values to the last bit."""
    batch = batch_of(BEFORE)
    for seed in range(5):
        logits = random_logits(len(BEFORE), seed=seed, dtype=dtype)
        tokens, ours = processed(GumbelSampler(logprobs_mode=mode), logits, batch)
        _, stock = processed(Sampler(logprobs_mode=mode), logits, batch)
        assert torch.equal(ours, stock)
        assert (ours.gather(1, torch.tensor(tokens).unsqueeze(1)) > -torch.inf).all(), "a masked token was drawn"
        assert draw(logits, batch) == tokens, "also without logprobs"
    assert (ours[3, [11, 12]] == -torch.inf).all(), "the case is one: bad words are masked"
    assert ours[3, 13] > -torch.inf
    assert (ours[5, [STOP, 30, 31]] == -torch.inf).all()
    assert (ours[6, [STOP, 30, 31]] > -torch.inf).all()


@pytest.mark.parametrize("parameters", BEFORE)
def test_each_change_before_the_draw_acts_when_it_is_the_only_one(parameters):
    """Where no request of a batch asks for any, logits are drawn from as they come."""
    batch, logits = batch_of([parameters] * 40), random_logits(40, dtype=torch.bfloat16)
    logits[:, [STOP, 3, 12, 30, 40, 50]] = 12.0  # ids that the requests above are about: mostly they would be drawn
    stock = processed(Sampler(logprobs_mode="processed_logits"), logits, batch)[1]
    assert draw(logits, batch) == expected(stock, batch, temperature=np.full(40, parameters["temperature"] > 0, "f4"))


@pytest.mark.parametrize("parameters", BEFORE)
def test_odd_rows_change_themselves_alone(parameters):
    """Two odd rows among plain ones: they alone are copied, and the logits that the model gave stay as they are."""
    rows = [{"temperature": 1.0}] * 40
    rows[17] = rows[23] = parameters
    batch, logits = batch_of(rows), random_logits(40, dtype=torch.bfloat16)
    logits[:, [STOP, 3, 12, 30, 40, 50]] = 9.0
    stock = processed(Sampler(logprobs_mode="processed_logits"), logits, batch)[1]
    given = logits.clone()
    tokens = tokens_of(GumbelSampler()(given, batch.sampling_metadata))
    assert tokens == expected(stock, batch, temperature=np.array([each["temperature"] > 0 for each in rows], "f4"))
    assert torch.equal(given, logits)


def test_processor_of_another_package_that_moves_the_argmax_acts_before_the_draw():
    spoil = {"temperature": 1.0, "extra_args": {"spoil": "some_nan"}}
    batch, logits = batch_of([{**spoil, "seed": i} for i in range(20)], custom=[SpoilLogits]), random_logits(20)
    tokens = draw(logits, batch)
    assert tokens == expected(torch.cat([torch.full((20, 150), NAN), logits[:, 150:]], dim=1), batch)
    assert min(tokens) >= 150


def test_filters_without_ties_keep_stocks_ids():
    """Stock keeps more than k among equals; without ties the kept sets agree, in their values too."""
    params = [{**each, "temperature": each["temperature"] or 0.4} for each in mixed(28)]
    batch = batch_of(params)
    for seed in range(5):
        logits = random_logits(28, seed=seed)
        assert all(len(row.unique()) == 300 for row in logits)
        _, ours = processed(GumbelSampler(logprobs_mode="processed_logits"), logits, batch)
        _, stock = processed(Sampler(logprobs_mode="processed_logits"), logits, batch)
        assert torch.equal(ours, stock)
        kept = (ours > -torch.inf).sum(-1)
        assert kept.min() <= 5
        assert kept.max() == 300


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_stocks_in_every_mode(mode, dtype):
    """Values, ids of the best, all of them, chosen ids; rank and logprob of the token that was drawn.

    Within 1e-5 for raw logprobs, whose sum is taken in float64; to the last bit otherwise. Among equal logits of
    bfloat16 which are listed first is arbitrary in stock.
    """
    tolerance = 1e-5 if mode == "raw_logprobs" else 0
    params = [{**each, "output": [5, 6]} for each in mixed(14)]
    params[3] = {**params[3], "presence_penalty": 1.0}
    logits, batch = random_logits(14, dtype=dtype), batch_of(params)
    ours, stock = GumbelSampler(logprobs_mode=mode), Sampler(logprobs_mode=mode)
    tokens, every = processed(ours, logits, batch)
    assert torch.equal(every, processed(stock, logits, batch)[1])
    token_column = torch.tensor(tokens).unsqueeze(1)
    own = every.gather(1, token_column)
    chosen_ids = {i: [i, 299, 5][: 1 + i % 3] for i in range(14)}
    for changed in ({"max_num_logprobs": 0}, {"max_num_logprobs": 5}, {"logprob_token_ids": chosen_ids}):
        metadata = replace(batch.sampling_metadata, **changed)
        output = ours(logits.clone(), metadata)
        mine, theirs = output.logprobs_tensors, stock(logits.clone(), metadata).logprobs_tensors
        assert tokens_of(output) == tokens, "logprobs change no token"
        assert torch.allclose(mine.logprobs[:, 1:], theirs.logprobs[:, 1:], rtol=0, atol=tolerance)
        listed = every.gather(1, mine.logprob_token_ids.long())
        finite = mine.logprobs > -torch.inf  # which of the ids without mass are listed is arbitrary
        assert torch.allclose(mine.logprobs[finite], listed[finite], rtol=0, atol=tolerance)
        assert torch.equal(mine.logprob_token_ids[:, :1], token_column.int())
        assert torch.allclose(mine.logprobs[:, :1], own, rtol=0, atol=tolerance)
        assert (mine.selected_token_ranks <= (every >= own - tolerance).sum(-1)).all()
        assert (mine.selected_token_ranks >= (every >= own + tolerance).sum(-1)).all()
        assert mine.logprobs.shape[1] == 1 + changed.get("max_num_logprobs", 3)


def spoiled(logits):
    """Return logits with every kind of bad row at the odd places, and the kinds."""
    kinds = {
        "one nan": {5: NAN},
        "nan at both ends": {0: NAN, 299: NAN},
        "one +inf": {9: INFINITY},
        "two +inf and a nan": {40: INFINITY, 200: INFINITY, 3: NAN},
        "all nan": dict.fromkeys(range(300), NAN),
        "all -inf": dict.fromkeys(range(300), -INFINITY),
        "nan and -inf": {i: NAN if i % 2 else -INFINITY for i in range(300)},
        "all but one": {i: -INFINITY if i % 2 else NAN for i in range(300) if i != 77},
        "only nan and +inf": {i: INFINITY if i == 299 else NAN for i in range(300)},
    }
    logits = logits.clone()
    for row, values in zip(range(1, len(logits), 2), kinds.values(), strict=False):
        logits[row, list(values)] = torch.tensor(list(values.values()), dtype=logits.dtype)
    return logits, list(kinds)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize(("policy", "token"), [("stop", STOP), ("lowest", 0)])
@pytest.mark.parametrize("mode", MODES)
def test_bad_rows_are_drawn_from_what_is_left_and_touch_no_neighbour(temperature, policy, token, mode):
    """colibri#369, vllm#22881, vllm#48585, flashinfer#2402: a NaN never wins, +inf does, lowest id of several.

    A row with nothing left gives what the policy says; JSON can carry every logprob (vLLM floors -inf itself).
    """
    good = random_logits(19)
    bad, kinds = spoiled(good)
    batch = batch_of([{"temperature": temperature, "logprobs": 5, "seed": i} for i in range(19)])
    sampler = GumbelSampler(settings=SamplerSettings(on_bad_row=policy), logprobs_mode=mode)
    metadata = batch.sampling_metadata
    output, clean = sampler(bad.clone(), metadata), sampler(good.clone(), metadata)
    tokens, undisturbed = tokens_of(output), tokens_of(clean)
    assert tokens[::2] == undisturbed[::2]
    assert torch.equal(output.logprobs_tensors.logprobs[::2], clean.logprobs_tensors.logprobs[::2])
    found = dict(zip(kinds, tokens[1::2], strict=True))
    assert found["one +inf"] == 9
    assert found["two +inf and a nan"] == 40
    assert found["all but one"] == 77
    assert found["only nan and +inf"] == 299
    assert found["all nan"] == found["all -inf"] == found["nan and -inf"] == token
    masked = torch.where(bad.isnan(), -torch.inf, bad)
    assert tokens[1:5:2] == expected(masked, batch)[1:5:2]
    best = masked[[1, 3]].topk(5).indices
    assert torch.equal(output.logprobs_tensors.logprob_token_ids[[1, 3], 1:].long(), best), "the best are no NaN"
    for values in (output.logprobs_tensors.logprobs, processed(sampler, bad, batch)[1]):
        json.dumps(torch.where(values == -torch.inf, -9999.0, values).tolist(), allow_nan=False)


def test_logprobs_of_a_bad_row_are_those_of_what_is_left():
    bad, kinds = spoiled(random_logits(19))
    logprobs = GumbelSampler.compute_logprobs(bad)
    rows = dict(zip(kinds, logprobs[1::2], strict=True))
    assert torch.allclose(rows["one nan"].exp().sum(), torch.tensor(1.0))
    assert rows["one nan"][5] == -torch.inf
    assert rows["one +inf"].exp().tolist() == [float(i == 9) for i in range(300)]
    assert rows["two +inf and a nan"].exp().tolist() == pytest.approx([0.5 * (i in (40, 200)) for i in range(300)])
    assert (rows["all nan"] == -torch.inf).all()
    assert torch.equal(logprobs[::2], Sampler.compute_logprobs(bad)[::2])


@pytest.mark.parametrize(
    ("parameters", "default_stop", "token"),
    [
        ({"stop": 7, "stop_token_ids": [3]}, 9, 7),
        ({"stop": None, "stop_token_ids": [30, 4, 20]}, 9, 4),
        ({"stop": None}, 9, 9),
        ({"stop": 0}, 9, 0),
        ({"stop": None}, 0, 0),
        ({"stop": None}, None, 0),
    ],
)
def test_stop_token_of_a_bad_row_is_the_requests_own_if_it_has_one(parameters, default_stop, token):
    metadata = batch_of([{"temperature": 1.0}, parameters]).sampling_metadata
    assert tokens_of(GumbelSampler(default_stop=default_stop)(torch.full((2, 300), NAN), metadata)) == [STOP, token]


def test_argmax_invariant_processor_of_another_package_sees_tempered_logits():
    """Halving what temperature left is the same, to the last bit, as a temperature twice as high."""
    params = [{**each, "extra_args": {"halve": i % 3 > 0}, "min_p": 0.0} for i, each in enumerate(mixed(28))]
    batch = batch_of(params, custom=[HalveTempered])
    temperature = batch.sampling_metadata.rows.params().temperature
    doubled = np.where([i % 3 > 0 for i in range(28)], temperature * 2, temperature)
    for seed in range(5):
        logits = random_logits(28, seed=seed)
        assert draw(logits, batch) == expected(logits, batch, temperature=doubled) != expected(logits, batch)


def test_argmax_invariant_processors_act_in_vllms_order():
    """Its own min_p first, so it sees what no other processor has changed; stock's values to the last bit."""
    params = [{"min_p": 0.02, **each, "extra_args": {"halve": i % 3 > 0}} for i, each in enumerate(MIXED[1:] * 4)]
    batch = batch_of(params, custom=[HalveTempered])
    for seed in range(5):
        logits = random_logits(24, seed=seed)
        tokens, ours = processed(GumbelSampler(logprobs_mode="processed_logits"), logits, batch)
        assert torch.equal(ours, processed(Sampler(logprobs_mode="processed_logits"), logits, batch)[1])
        assert (ours.gather(1, torch.tensor(tokens).unsqueeze(1)) > -torch.inf).all()


@pytest.mark.parametrize("top_k", [300, 301, 9_999_999, 2**31 - 1, 0, -1])
def test_top_k_past_the_vocabulary_is_no_top_k(top_k):
    """sendnn-inference#542"""
    plain = [{"temperature": 1.0, "seed": i} for i in range(20)]
    limited = [{**each, "top_k": top_k} for each in plain]
    assert draw(random_logits(20), batch_of(limited)) == draw(random_logits(20), batch_of(plain))


def test_ids_past_the_tokenizer_are_never_drawn():
    """vllm#13175: whatever their logits, and the draw among the others is the one without them."""
    logits, batch = random_logits(28), batch_of(mixed(28))
    padded = torch.cat([logits[:, :280], torch.full((28, 20), 50.0)], dim=1)
    masked = torch.cat([logits[:, :280], torch.full((28, 20), -torch.inf)], dim=1)
    tokens = tokens_of(GumbelSampler(usable_vocab=280)(padded, batch.sampling_metadata))
    assert tokens == draw(masked, batch)
    assert max(tokens) < 280
    assert tokens_of(GumbelSampler(usable_vocab=400)(logits.clone(), batch.sampling_metadata)) == draw(logits, batch)
