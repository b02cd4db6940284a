"""The request table of runner V1 against plain dictionaries, over everything that a runner does with it.

`tests/test_rows.py` walks with parameters alone; here requests also have arms, shadows, penalties, keys, allowed ids
and drafts, are preempted with tokens taken back, aborted while they wait, and come again under an old name; and at the
end nothing of them may be left. Batch and requests are vLLM's own classes, driven as its model runner drives them.
"""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from tests.rows import turn
from tests.test_rows import LENGTH, VOCABULARY, append, make_batch, make_request, parameters
from vllm_gumbel import SamplerSettings
from vllm_gumbel.integration.rows import RowBatch, SeedSource
from vllm_gumbel.rollout.state import Rollout

ROWS, DRAFTS, STEPS = 8, 3, 800
LONGEST = LENGTH - 2 * (1 + DRAFTS)
LOGITS = np.random.default_rng(0).normal(0, 3, VOCABULARY).astype(np.float32)


#: What a walk does, in the order in which a runner does it in a step; and how often, one to another.
ACTS = ("finish", "preempt", "abort", "turn", "admit", "resume", "swap", "propose", "generate")
WEIGHTS = (1, 3, 1, 1, 5, 3, 3, 3, 6)


class Table:
    """A batch, and what it should hold: one plain dictionary a request that exists.

    The share of the rollout is 0 or 1 at any time, so that an arm needs no hash to be foretold.

    Args:
        seed: which walk.
        kind: class of the batch.
    """

    def __init__(self, seed, kind=RowBatch):
        self.random, self.name = random.Random(seed), 0
        self.rollout = Rollout(SamplerSettings(rollout_fraction=1.0, rollout_shadow=0.0))
        self.batch = make_batch(
            kind, rows=ROWS, num_spec_tokens=DRAFTS, seeds=SeedSource(seed, 1), default_salt=5, rollout=self.rollout
        )
        self.seeds = SeedSource(seed, 1)
        self.requests, self.expected, self.waiting, self.gone = {}, {}, [], []
        self.admissions, self.slots, self.done = [], {}, Counter()

    # What a runner and its clients do, each at random.

    def admit(self):
        """Let a new request in; one in four has the name of one that is gone."""
        if self.batch.num_reqs == ROWS:
            return
        pick = self.random.choice
        name = self.gone.pop(self.random.randrange(len(self.gone))) if self.gone and pick([0, 0, 0, 1]) else None
        if name is None:
            self.name += 1
            name = f"request {self.name}"
        temperature, own = pick([0.0, 0.5, 1.0]), pick([None, None, 0, 7, 2**63])
        asked = pick([None, "gumbel", "default"])
        repetition, frequency, presence = pick([(1.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.5, 0.25, -0.5), (1.0, 1.5, 0.0)])
        hybrid = pick([0, 0, 3]) if temperature and asked != "default" else 0
        salt = None if asked == "default" else pick([None, 0, 9])
        keys = {"gumbel_salt": salt, "gumbel_sampler": asked, "gumbel_hybrid_steps": hybrid}
        allowed, min_p, told = (
            pick([None, None, [1, 2, 3]]),
            pick([0.0, 0.25]),
            int(asked != "default" and pick([0, 0, 1])),
        )
        prompt = self.random.choices(range(VOCABULARY), k=self.random.randint(1, 30))
        generator = None if own is None else torch.Generator()
        given = {key: value for key, value in keys.items() if value is not None} | {"gumbel_return_info": told}
        request = make_request(
            name,
            prompt=prompt,
            stop=2,
            generator=generator,
            temperature=temperature,
            seed=own,
            min_p=min_p,
            repetition_penalty=repetition,
            frequency_penalty=frequency,
            presence_penalty=presence,
            allowed_token_ids=allowed,
            extra_args=given,
        )
        seed = self.seeds.next() if own is None else own
        opened = self.rollout.breaker.is_open
        arm = "default" if opened else asked or ("gumbel" if self.rollout.fraction else "default")
        by_stock, shadowed = arm == "default", arm == "default" and not opened and self.rollout.shadow == 1
        self.requests[name] = request
        self.expected[name] = {
            "row": {
                "seed": seed,
                "salt": 5 if salt is None else salt,
                "temperature": temperature,
                "top_k": VOCABULARY,
                "top_p": 1.0,
                "min_p": min_p if temperature else 0.0,
            },
            "prompt": prompt,
            "output": [],
            "penalties": (repetition, frequency, presence) if (repetition, frequency, presence) != (1, 0, 0) else None,
            "by_stock": by_stock,
            "shadowed": shadowed,
            "keyed": by_stock or hybrid > 0,
            "untouched": by_stock and not shadowed and not hybrid,
            "seeded": own is not None,
            "generator": generator,
            "allowed": allowed,
            "told": told,
        }
        fallback = None
        if by_stock and asked == "gumbel":
            fallback = "breaker"
        elif by_stock and asked is None and (hybrid or salt is not None or told):
            fallback = "keys"
        self.enter(name, first=True, fallback=fallback)

    def enter(self, name, *, first, fallback=None):
        """Put a request into the batch."""
        self.batch.add_request(self.requests[name])
        self.admissions.append((name, tuple(self.expected[name]["output"]), first, fallback))

    def leave(self, name):
        """Take a request out of the batch."""
        assert self.batch.remove_request(name) is not None
        self.slots.pop(name, None)

    def forget(self, name):
        """Let a request be gone for good; its name may come again."""
        del self.requests[name], self.expected[name]
        self.gone.append(name)

    def finish(self):
        if self.batch.num_reqs:
            name = self.random.choice(list(self.batch.req_id_to_index))
            self.leave(name)
            self.forget(name)

    def preempt(self):
        """Let a request wait; in one of three some of its tokens are taken back, as after asynchronous scheduling."""
        if self.batch.num_reqs:
            name = self.random.choice(list(self.batch.req_id_to_index))
            self.leave(name)
            self.waiting.append(name)
            if self.random.random() < 1 / 3:
                kept = self.random.randint(0, len(self.expected[name]["output"]))
                del self.requests[name].output_token_ids[kept:], self.expected[name]["output"][kept:]

    def resume(self):
        if self.waiting and self.batch.num_reqs < ROWS:
            self.enter(self.waiting.pop(self.random.randrange(len(self.waiting))), first=False)

    def abort(self):
        """Let a client go away, whose request runs or waits; the runner tells the batch in either case."""
        if self.requests:
            name = self.random.choice(list(self.requests))
            if name in self.waiting:
                assert self.batch.remove_request(name) is None
                self.waiting.remove(name)
            else:
                self.leave(name)
            self.forget(name)

    def turn(self):
        turn(self.rollout, self.random)

    def swap(self):
        if self.batch.num_reqs > 1:
            self.batch.swap_states(*self.random.sample(range(self.batch.num_reqs), 2))

    def propose(self):
        """Give every row other drafts than it had, of any number."""
        count = self.random.randint
        drafts = {name: self.random.choices(range(VOCABULARY), k=count(0, DRAFTS)) for name in self.batch.req_ids}
        for name in self.batch.req_ids:
            self.batch.update_req_spec_token_ids(self.requests[name], drafts)

    def generate(self):
        """Append one token to every row, or several, as where drafts were accepted."""
        for _ in range(self.random.choice([1, 1, 1 + DRAFTS])):
            token = self.random.randrange(VOCABULARY)
            append(self.batch, self.requests, token)
            for name in self.batch.req_ids:
                self.expected[name]["output"].append(token)

    def step(self):
        """Do four things at random in the order in which a runner does them; compare all rows before and after a draw.

        vLLM's batch takes no removal after an addition, and is condensed once.
        """
        for name in list(self.batch.req_id_to_index):
            if len(self.expected[name]["prompt"]) + len(self.expected[name]["output"]) > LONGEST:
                self.leave(name)
                self.forget(name)
        chosen = self.random.choices(range(len(ACTS)), WEIGHTS, k=4)
        self.done.update(chosen)
        self.act(chosen, "finish", "preempt", "abort", "turn", "admit", "resume")
        self.batch.condense()
        self.act(chosen, "swap", "propose")
        self.batch.refresh_metadata()
        self.verify()
        self.act(chosen, "generate")
        self.verify()

    def act(self, chosen, *names):
        """Do those of the chosen acts that have one of the names, in the order of the names."""
        for name in names:
            for _ in range(chosen.count(ACTS.index(name))):
                getattr(self, name)()

    def verify(self):
        """Compare everything that the draw is told with the dictionaries."""
        names, batch, free = self.batch.req_ids, self.batch, self.batch._free_slots
        waiting = set(self.requests) - set(names)
        assert (set(batch._request_rows), waiting) == (set(names), set(self.waiting))
        rows, here = batch._rows, [self.expected[name] for name in names]
        slots = rows.slot[: len(names)].tolist()
        assert sorted([*slots, *free]) == list(range(ROWS)), "every slot has one owner"
        for name, slot in zip(names, slots, strict=True):
            assert self.slots.setdefault(name, slot) == slot, "a slot is kept as long as its request is in the batch"
        admitted = [(each.slot, each.tokens, each.first, each.fallback) for each in rows.take_admitted()]
        assert admitted == [(self.slots[name], *rest) for name, *rest in self.admissions]
        self.admissions.clear()
        if not names:
            return
        positions = [len(each["prompt"]) + len(each["output"]) - 1 for each in here]
        assert parameters(batch) == [each["row"] | {"position": p} for each, p in zip(here, positions, strict=True)]
        assert batch.sampling_metadata.rows is rows
        assert batch.sampling_metadata.generators == batch.generators == {}
        assert rows.stop_token == [2] * len(names)
        assert [rows.generated(i) for i in range(len(names))] == [len(each["output"]) for each in here]
        assert rows.seeded[: len(names)].tolist() == [each["seeded"] for each in here]
        assert rows.restricted == [i for i, each in enumerate(here) if each["allowed"]]
        assert rows.untouched == all(each["untouched"] for each in here)
        keyed = [(i, each["by_stock"], each["shadowed"]) for i, each in enumerate(here) if each["keyed"]]
        assert [(i, request.is_stocks, request.shadowed) for i, request in rows.keyed] == keyed
        assert all(request.generator is here[i]["generator"] for i, request in rows.keyed)
        for i, penalties in rows.penalties:
            penalties.update(batch.sampling_metadata.output_token_ids[i])
            logits = LOGITS.copy()
            penalties.apply(logits)
            np.testing.assert_allclose(logits, penalised(here[i]), rtol=1e-6)
        assert [i for i, _ in rows.penalties] == [i for i, each in enumerate(here) if each["penalties"]]
        for each, name in zip(here, names, strict=True):
            if each["told"]:
                assert batch.told[name] == (each["row"]["seed"], each["row"]["salt"])

    def empty(self):
        """Let all requests go, and compare what is left with a batch that never had one."""
        for name in list(self.requests):
            if name not in self.waiting:
                self.leave(name)
        self.requests.clear()
        self.waiting.clear()
        self.admissions.clear()
        self.batch.admitted.clear()
        self.batch.condense()
        self.batch.refresh_metadata()
        self.verify()
        rows = self.batch._rows
        assert (rows.stop_token, rows.penalties, rows.keyed, rows.restricted, rows.untouched) == ([], [], [], [], False)
        fresh = make_batch(rows=ROWS, num_spec_tokens=DRAFTS)
        for name, value in vars(fresh).items():
            if isinstance(value, set | dict) and name != "told":
                assert getattr(self.batch, name) == value, name


def penalised(request):
    """Return the walk's logits after a request's penalties, by their definition."""
    repetition, frequency, presence = request["penalties"]
    counts, logits = Counter(request["output"]), LOGITS.copy()
    for token in set(request["output"]) | set(request["prompt"]):
        logits[token] *= 1 / repetition if logits[token] > 0 else repetition
        logits[token] -= frequency * counts[token] + presence * (counts[token] > 0)
    return logits


def walk(table):
    for _ in range(STEPS):
        table.step()


@pytest.mark.parametrize("seed", range(6))
def test_table_is_that_of_plain_dictionaries_after_every_step(seed):
    """6 walks of 800 steps of four things each."""
    table = Table(seed)
    walk(table)
    assert min(table.done.values()) > 50
    assert len(table.done) == len(ACTS)
    table.empty()


class KeepsSlots(RowBatch):
    """Does not give slots back."""

    def remove_request(self, req_id):
        free = self._free_slots.copy()
        row = super().remove_request(req_id)
        self._free_slots = free
        return row


class KeepsRows(RowBatch):
    """Does not let go what it knows of a request."""

    def remove_request(self, req_id):
        kept = self._request_rows.get(req_id)
        row = super().remove_request(req_id)
        if kept is not None:
            self._request_rows[req_id] = kept
        return row


class DrawsSeedsAgain(RowBatch):
    """Gives a request that comes back another seed."""

    def add_request(self, request):
        vars(request).pop("gumbel_seed", None)
        return super().add_request(request)


class DecidesAgain(RowBatch):
    """Gives a request that comes back the arm of a new one."""

    def add_request(self, request):
        vars(request).pop("gumbel_arm", None)
        return super().add_request(request)


class IsBehind(RowBatch):
    """Tells of its rows as they were before they last changed places."""

    def swap_states(self, i1, i2):
        kept = self._rows.keyed, self._rows.seed.copy(), self._rows.slot.copy()
        super().swap_states(i1, i2)
        self.before = kept

    def _make_sampling_metadata(self):
        metadata = super()._make_sampling_metadata()
        if hasattr(self, "before"):
            self._rows.keyed, self._rows.seed, self._rows.slot = self.before
            del self.before
        return metadata


class CountsDrafts(RowBatch):
    """Takes drafts for tokens."""

    def update_req_spec_token_ids(self, request, scheduled_spec_tokens):
        super().update_req_spec_token_ids(request, scheduled_spec_tokens)
        self.num_tokens_no_spec[self.req_id_to_index[request.req_id]] += len(scheduled_spec_tokens[request.req_id])


class KeepsGenerators(RowBatch):
    """Lets torch's generators into the batch."""

    def add_request(self, request):
        row = super().add_request(request)
        if getattr(request, "gumbel_generator", None) is not None:
            self.generators[row] = request.gumbel_generator
        return row


BROKEN = (KeepsSlots, KeepsRows, DrawsSeedsAgain, DecidesAgain, IsBehind, CountsDrafts, KeepsGenerators)


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_walk_notices_a_broken_table(kind):
    table = Table(0, kind)
    with pytest.raises(AssertionError):
        walk(table)


def test_walk_notices_penalties_of_another_request():
    table = Table(1)
    while len(table.batch._rows.penalties) < 2:
        table.step()
    rows = table.batch._rows
    (i, first), (j, second) = rows.penalties[:2]
    rows.penalties[:2] = (i, second), (j, first)
    with pytest.raises(AssertionError):
        table.verify()
