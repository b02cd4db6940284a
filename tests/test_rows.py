"""Per-request state beside vLLM's batch: however requests come, move and go, every row has its own parameters.

The batch and its requests are vLLM's own classes, driven as its model runner drives them.
"""

import random
from dataclasses import fields
from inspect import signature

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.pooling_params import PoolingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_gumbel.integration.rows import RowBatch, RowMetadata, SeedSource
from vllm_gumbel.integration.v1 import GumbelSampler
from vllm_gumbel.kernels.contract import check
from vllm_gumbel.params import SEED_RANGE

VOCABULARY = 50
LENGTH = 160
UNSEEDED = -1  # vLLM takes this seed for None


def make_batch(kind=RowBatch, *, rows=8, vocabulary=VOCABULARY, processors=None, **keywords):
    """Return an empty batch; `keywords` are those of its class beyond the sizes."""
    if issubclass(kind, RowBatch):
        keywords = {"seeds": SeedSource(0, 0), "default_salt": 0, **keywords}
    if "kernel_block_sizes" in signature(InputBatch.__init__).parameters:  # vLLM 0.31
        keywords["kernel_block_sizes"] = [16]
    return kind(
        max_num_reqs=rows,
        max_model_len=LENGTH,
        max_num_batched_tokens=rows * LENGTH,
        device=torch.device("cpu"),
        vocab_size=vocabulary,
        block_sizes=[16],
        max_num_blocks_per_req=[LENGTH // 16],
        logitsprocs=processors or LogitsProcessors(),
        logitsprocs_need_output_token_ids=processors is not None,
        **keywords,
    )


def make_request(name, *, prompt=(1, 2, 3), output=(), stop=None, generator=None, **sampling):
    """Return a request as the runner keeps it; `stop` is the model's end-of-sequence id, `sampling` its parameters."""
    params = SamplingParams(**sampling)
    params.update_from_generation_config({}, stop)
    return CachedRequestState(
        req_id=name,
        prompt_token_ids=list(prompt),
        mm_features=[],
        sampling_params=params,
        generator=generator,
        block_ids=([0],),
        num_computed_tokens=0,
        output_token_ids=list(output),
    )


def filled(requests, **keywords):
    """Return a batch of these requests, ready to draw."""
    batch = make_batch(rows=len(requests), **keywords)
    for request in requests:
        batch.add_request(request)
    batch.refresh_metadata()
    return batch


def append(batch, requests, token):
    """Append an output token to every row, as the runner's bookkeeping does."""
    for row, name in enumerate(batch.req_ids):
        end = batch.num_tokens_no_spec[row]
        batch.token_ids_cpu[row, end] = token
        batch.num_tokens_no_spec[row] = end + 1
        requests[name].output_token_ids.append(token)


def parameters(batch):
    """Return what the draw gets, as one dictionary of plain numbers per row."""
    params = batch.sampling_metadata.rows.params()
    check(np.zeros((batch.num_reqs, VOCABULARY), np.float32), params, None)  # dtypes and shapes
    names = [f.name for f in fields(params)]
    rows = zip(*(getattr(params, name).tolist() for name in names), strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows]


class Model:
    """What the batch should hold: one plain dictionary per request that exists, in the batch or preempted.

    Args:
        seed: which random walk.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.default_salt = self.random.choice([0, 7, 2**64 - 1])
        self.batch = make_batch(seeds=SeedSource(seed, 3), default_salt=self.default_salt)
        self.expected_seeds = SeedSource(seed, 3)
        self.requests = {}
        self.expected = {}
        self.waiting = []
        self.admitted = 0

    def new_request(self):
        """Make a request and note what its rows should be; its seed, if it has none, is the next of the source."""
        pick = self.random.choice
        temperature = pick([0, 0.5, 1.0, 1.75])
        seed = pick([None, UNSEEDED, 0, 1, -2, 2**63, *SEED_RANGE])
        salt = pick([None, None, 0, 1, -1, *SEED_RANGE])
        top_k, top_p, min_p = pick([-1, 0, 1, 7, 50, 10**6]), pick([1.0, 0.5, 0.125]), pick([0.0, 0.25, 1.0])
        stop, others = pick([None, 2, 0]), pick([None, [], [9, 4]])
        prompt = self.random.choices(range(VOCABULARY), k=self.random.randint(1, 40))
        name = f"request {pick(range(30))}" if self.random.random() < 0.3 else f"request {self.admitted + 100}"
        if name in self.requests:
            return None
        request = make_request(
            name,
            prompt=prompt,
            stop=stop,
            generator=None if seed is None else torch.Generator(),
            temperature=temperature,
            seed=seed,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            stop_token_ids=others,
            extra_args=None if salt is None else {"gumbel_salt": salt, "of_somebody_else": "x"},
        )
        self.requests[name] = request
        self.admitted += 1
        drawn = self.expected_seeds.next() if seed in (None, UNSEEDED) else seed
        self.expected[name] = {
            "seed": drawn % 2**64,
            "salt": (self.default_salt if salt is None else salt) % 2**64,
            "temperature": float(temperature),
            "top_k": top_k if temperature and 0 < top_k < VOCABULARY else VOCABULARY,
            "top_p": top_p if temperature else 1.0,
            "min_p": min_p if temperature else 0.0,
            "prompt": len(prompt),
            "stop": stop if stop is not None else (min(others) if others else None),
        }
        return request

    def step(self):
        """Do what the runner does between two draws, in its order, at random."""
        batch, chance = self.batch, self.random.random
        for name in list(batch.req_id_to_index):
            if chance() < 0.15 or len(self.requests[name].output_token_ids) > 100:
                batch.remove_request(name)
                if chance() < 0.5 and len(self.requests[name].output_token_ids) < 100:
                    self.waiting.append(name)  # preempted, or not scheduled this time
                else:
                    del self.requests[name], self.expected[name]
        while batch.num_reqs < batch.max_num_reqs and chance() < 0.5:
            if self.waiting and chance() < 0.6:
                batch.add_request(self.requests[self.waiting.pop(self.random.randrange(len(self.waiting)))])
            elif (request := self.new_request()) is not None:
                batch.add_request(request)
        batch.condense()
        while batch.num_reqs > 1 and chance() < 0.3:
            batch.swap_states(*self.random.sample(range(batch.num_reqs), 2))
        batch.refresh_metadata()

    def verify(self):
        """Compare every row with the dictionary of the request that is in it."""
        if not self.batch.num_reqs:
            return
        expected = [dict(self.expected[name]) for name in self.batch.req_ids]
        stops = [row.pop("stop") for row in expected]
        for name, row in zip(self.batch.req_ids, expected, strict=True):
            row["position"] = row.pop("prompt") + len(self.requests[name].output_token_ids) - 1
        assert parameters(self.batch) == expected
        assert self.batch.sampling_metadata.rows.stop_token == stops
        assert self.batch.sampling_metadata.generators == {}


@pytest.mark.parametrize("seed", range(6))
def test_every_row_has_its_own_parameters_after_every_step(seed):
    """vllm#19940, vllm#17524, vllm#27878: 6 walks of 700 steps; preempted requests come back with seed and position.

    Each step adds, removes, preempts, resumes, condenses and swaps at random; then three tokens are appended without
    the batch changing, and positions follow.
    """
    model = Model(seed)
    for step in range(700):
        model.step()
        for _ in range(3):
            model.verify()
            append(model.batch, model.requests, token=step % VOCABULARY)
    assert model.admitted > 250


def test_walk_can_fail():
    """A seed that went to the wrong row, or was drawn again after preemption, is noticed."""
    model = Model(0)
    while model.batch.num_reqs < 3:
        model.step()
    model.verify()
    rows = model.batch.sampling_metadata.rows
    rows.seed[[0, 1]] = rows.seed[[1, 0]] + np.uint64(1)
    with pytest.raises(AssertionError):
        model.verify()


def test_unseeded_request_keeps_its_seed_over_preemption():
    request = make_request("a", temperature=1.0)
    batch = filled([request, make_request("b", temperature=1.0)])
    before = parameters(batch)[0]
    request.output_token_ids += [4, 5]
    batch.remove_request("a")
    batch.condense()
    batch.refresh_metadata()
    batch.add_request(make_request("c", temperature=1.0))
    batch.remove_request("c")
    batch.condense()
    batch.refresh_metadata()
    batch.add_request(request)
    batch.refresh_metadata()
    assert parameters(batch)[batch.req_id_to_index["a"]] == before | {"position": before["position"] + 2}


def test_unseeded_seeds_follow_the_order_of_admission():
    """Tensor-parallel ranks admit alike and so draw alike; a seeded request takes nothing from the source."""
    names = [f"request {i}" for i in range(6)]
    for _rank in range(2):
        requests = [make_request(name, temperature=1.0, seed=3 if name == "request 2" else None) for name in names]
        source = SeedSource(11, 0)
        expected = [3 if name == "request 2" else source.next() for name in names]
        assert [row["seed"] for row in parameters(filled(requests, seeds=SeedSource(11, 0)))] == expected


def test_replicas_and_servers_do_not_repeat_each_other():
    first = [SeedSource(*key).next() for key in ((0, 0), (0, 1), (1, 0), (1, 1), (None, 0), (None, 0), (-1, 0))]
    assert len(set(first)) == len(first)


def test_seed_source_gives_64_bits_and_repeats_itself():
    """Of 4,000 words every bit is set in 2,000 +- 200: 6 standard deviations, 64 bits: false alarms below 2e-7."""
    source, again = SeedSource(5, 2), SeedSource(5, 2)
    seeds = [source.next() for _ in range(4000)]
    assert seeds == [again.next() for _ in range(4000)]
    assert len(set(seeds)) == 4000
    bits = [sum(seed >> bit & 1 for seed in seeds) for bit in range(64)]
    assert 1800 < min(bits) <= max(bits) < 2200
    assert all(isinstance(seed, int) and 0 <= seed < 2**64 for seed in seeds)


def test_seed_of_the_server_is_a_word():
    assert SeedSource(-1, 0).next() == SeedSource(2**64 - 1, 0).next()


@pytest.mark.parametrize(
    ("given", "word"), [(0, 0), (-2, 2**64 - 2), (2**63, 2**63), (SEED_RANGE[1], 2**64 - 1), (SEED_RANGE[0], 2**63)]
)
def test_seed_and_salt_are_taken_modulo_a_word(given, word):
    arguments = {"gumbel_salt": given}
    (row,) = parameters(filled([make_request("a", temperature=1.0, seed=given, extra_args=arguments)]))
    assert (row["seed"], row["salt"]) == (word, word)


def test_salt_of_the_server_holds_where_a_request_sets_none():
    requests = [make_request("a"), make_request("b", extra_args={"gumbel_salt": 0}), make_request("c", extra_args={})]
    assert [row["salt"] for row in parameters(filled(requests, default_salt=-5))] == [2**64 - 5, 0, 2**64 - 5]


def test_generators_never_enter_the_batch():
    """vllm-rbln#1025: with one in the batch, a prompt in chunks ends the engine on a CPU."""
    request = make_request("a", temperature=1.0, seed=7, generator=torch.Generator())
    batch = filled([request])
    batch.remove_request("a")
    batch.condense()
    batch.refresh_metadata()
    request.generator = torch.Generator()
    batch.add_request(request)
    batch.refresh_metadata()
    assert batch.generators == batch.sampling_metadata.generators == {}


def test_drafts_do_not_move_the_position():
    request = make_request("a", temperature=1.0)
    batch = make_batch(rows=1, num_spec_tokens=3)
    batch.add_request(request)
    batch.refresh_metadata()
    batch.update_req_spec_token_ids(request, {"a": [5, 6, 7]})
    assert [row["position"] for row in parameters(batch)] == [2]


def test_metadata_is_that_of_vllm_with_rows():
    requests = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "presence_penalty": 1.0, "logprobs": 2}
    ours, stock = make_batch(), make_batch(InputBatch)
    for batch in (ours, stock):
        batch.add_request(make_request("a", **requests, allowed_token_ids=[1, 2]))
        batch.add_request(make_request("b", temperature=0))
        batch.refresh_metadata()
    assert type(ours.sampling_metadata) is RowMetadata
    assert type(stock.sampling_metadata) is SamplingMetadata
    for field in fields(SamplingMetadata):
        mine, theirs = (getattr(batch.sampling_metadata, field.name) for batch in (ours, stock))
        if isinstance(theirs, torch.Tensor):
            assert torch.equal(mine, theirs), field.name
        elif field.name != "logitsprocs":
            assert mine == theirs, field.name
    assert ours.sampling_metadata.logitsprocs is ours.logitsprocs


def test_removing_an_unknown_request_is_harmless():
    batch = filled([make_request("a", temperature=1.0)])
    assert batch.remove_request("b") is None
    assert parameters(batch)[0]["position"] == 2


def test_pooling_models_have_no_rows():
    batch = make_batch(is_pooling_model=True)
    state = make_request("a")
    state.sampling_params, state.pooling_params = None, PoolingParams(task="embed")
    state.__post_init__()
    batch.add_request(state)
    batch.refresh_metadata()
    assert not isinstance(batch.sampling_metadata, RowMetadata)
    batch.remove_request("a")
    batch.condense()
    batch.refresh_metadata()
    assert batch.num_reqs == 0


def detached(rows, **changed):
    """Return sampling metadata as vLLM's runner makes it for its profiling run, which belongs to no batch."""
    values = {
        "temperature": torch.full((rows,), 0.5),
        "all_greedy": False,
        "all_random": False,
        "top_p": torch.full((rows,), 0.9),
        "top_k": torch.full((rows,), 299),
        "generators": {},
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": None,
        "output_token_ids": [[] for _ in range(rows)],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    penalties = [f"{kind}_penalties" for kind in ("frequency", "presence", "repetition")]
    return SamplingMetadata(**{**values, **dict.fromkeys(penalties, torch.full((rows,), 0.1)), **changed})


def test_rows_that_belong_to_no_batch_are_drawn_independently():
    """vLLM 0.33's ROCm path drew equal unseeded rows alike. Filters hold; two samplers built alike agree."""
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).div(2).repeat(64, 1)

    def draw(metadata, seed=0):
        return GumbelSampler(seeds=SeedSource(seed, 0))(logits.clone(), metadata).sampled_token_ids.flatten().tolist()

    assert draw(detached(64)) == draw(detached(64)) != draw(detached(64), seed=1)
    assert len(set(draw(detached(64)))) > 5
    narrow = detached(64, top_k=torch.full((64,), 2, dtype=torch.int32), top_p=None)
    assert set(draw(narrow)) == set(logits[0].topk(2).indices.tolist())
    greedy = detached(64, temperature=None, all_greedy=True, top_k=None, top_p=None)
    assert set(draw(greedy)) == {int(logits[0].argmax())}
