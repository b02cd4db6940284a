"""The slots of runner V2 against plain dictionaries, over everything that a runner does with its requests.

As `tests/test_row_table_model.py` does for runner V1: vLLM's own table of requests around ours, walked at random.
"""

import random
from collections import Counter

import numpy as np
import pytest
from vllm import SamplingParams

from tests.rows import turn
from tests.v2.building import Driver
from vllm_gumbel.integration.rows import SeedSource
from vllm_gumbel.integration.slots import SlotStates

SLOTS, VOCABULARY, STEPS = 8, 50, 500
ACTS = ("finish", "preempt", "abort", "turn", "admit", "resume", "generate")
WEIGHTS = (1, 3, 1, 1, 5, 4, 4)


class Table:
    """Slots, and what they should hold: one plain dictionary a request that exists.

    Args:
        config: vLLM's configuration of a real model.
        seed: which walk.
    """

    def __init__(self, config, seed):
        self.random, self.name, self.done = random.Random(seed), 0, Counter()
        self.driver = Driver(config, slots=SLOTS, vocab=VOCABULARY, backend="reference", salt=5)
        self.sampler, self.table = self.driver.sampler, self.driver.states
        self.rollout, self.states = self.sampler.rollout, self.sampler.sampling_states
        self.seeds = SeedSource(config.model_config.seed, 0)
        self.requests, self.waiting, self.admissions = {}, [], []

    def running(self):
        return list(self.table.req_id_to_index)

    def admit(self):
        if self.table.num_reqs == SLOTS:
            return
        pick, self.name = self.random.choice, self.name + 1
        name, asked = f"request {self.name}", pick([None, "gumbel", "default"])
        given = {
            "temperature": pick([0.0, 0.5, 1.0]),
            "top_k": pick([-1, 1, 7]),
            "top_p": pick([1.0, 0.5]),
            "min_p": pick([0.0, 0.25]),
            "seed": pick([None, 0, 7, 2**63]),
            "repetition_penalty": pick([1.0, 1.5]),
            "frequency_penalty": pick([0.0, 0.25]),
            "presence_penalty": pick([0.0, -0.5]),
            "stop_token_ids": pick([None, [9, 4]]),
        }
        salt = None if asked == "default" else pick([None, 0, 9])
        keys = {"gumbel_sampler": asked, "gumbel_salt": salt}
        opened = self.rollout.breaker.is_open
        arm = "default" if opened else asked or ("gumbel" if self.rollout.fraction else "default")
        by_stock, fallback = arm == "default", None
        if by_stock and asked == "gumbel":
            fallback = "breaker"
        elif by_stock and asked is None and salt is not None:
            fallback = "keys"
        self.requests[name] = {
            "given": given,
            "extra": {key: value for key, value in keys.items() if value is not None},
            "salt": 5 if salt is None else salt,
            "by_stock": by_stock,
            "shadowed": by_stock and not opened and self.rollout.shadow == 1,
            "prompt": self.random.choices(range(VOCABULARY), k=self.random.randint(1, 20)),
            "output": [],
            "fallback": fallback,
        }
        self.enter(name, new=True)

    def enter(self, name, *, new=False):
        """Give a request a slot, and a seed if it brings none: each time, since V2 keeps nothing of it elsewhere."""
        request = self.requests[name]
        tokens, params = [*request["prompt"], *request["output"]], SamplingParams(**request["given"])
        params.extra_args = request["extra"]
        self.table.add_request(name, len(request["prompt"]), tokens, len(tokens) - 1, 30)
        self.sampler.add_request(self.table.req_id_to_index[name], params)
        seed = request["given"]["seed"]
        request["seed"] = self.seeds.next() if seed is None else seed
        slot = self.table.req_id_to_index[name]
        self.admissions.append((slot, new, request["by_stock"], request["fallback"] if new else None))

    def leave(self):
        name = self.random.choice(self.running())
        self.table.remove_request(name)
        return name

    def finish(self):
        if self.running():
            del self.requests[self.leave()]

    def preempt(self):
        if self.running():
            self.waiting.append(self.leave())

    def resume(self):
        if self.waiting and self.table.num_reqs < SLOTS:
            self.enter(self.waiting.pop(self.random.randrange(len(self.waiting))))

    def abort(self):
        """Let a request be gone that runs or waits; the runner tells the table in either case."""
        if self.requests:
            name = self.random.choice(list(self.requests))
            assert (self.table.remove_request(name) is None) == (name in self.waiting)
            self.waiting = [each for each in self.waiting if each != name]
            del self.requests[name]

    def turn(self):
        turn(self.rollout, self.random)

    def generate(self):
        """Let every request have another token; one that waits comes back with it in what is fed."""
        for name in self.running():
            if len(self.requests[name]["output"]) < 20:
                self.requests[name]["output"].append(self.random.randrange(VOCABULARY))

    def walk(self):
        for step in range(STEPS):
            for act in sorted(self.random.choices(ACTS, WEIGHTS, k=4), key=ACTS.index):
                getattr(self, act)()
                self.done[act] += 1
            self.states.apply_staged_writes()
            if step % 25 == 0:  # kernels, slow in the interpreter
                self.table.apply_staged_writes()
                self.sampler.apply_staged_writes()
            self.verify()

    def verify(self):
        """Compare everything that the draw is told with the dictionaries."""
        names, states = self.running(), self.states
        assert set(self.requests) - set(names) == set(self.waiting)
        slots = [self.table.req_id_to_index[name] for name in names]
        assert sorted([*slots, *self.table.free_indices]) == list(range(SLOTS)), "every slot has one owner"
        admitted, self.sampler._admitted = self.sampler._admitted, []
        assert [(each.slot, each.first, each.by_stock, each.fallback) for each in admitted] == self.admissions
        self.admissions = []
        assert set(states.requests) <= set(range(SLOTS))
        for name, slot in zip(names, slots, strict=True):
            request, given = self.requests[name], self.requests[name]["given"]
            greedy = given["temperature"] == 0
            expected = {
                "seeds": request["seed"],
                "salt": request["salt"],
                "temperature": given["temperature"],
                "top_k": VOCABULARY if greedy or given["top_k"] < 1 else given["top_k"],
                "top_p": 1.0 if greedy else given["top_p"],
                "min_p": 0.0 if greedy else given["min_p"],
                "bad_row_token": 4 if given["stop_token_ids"] else 2,
                "by_stock": request["by_stock"],
            }
            for where in ("np", "gpu"):
                found = {column: _word(getattr(getattr(states, column), where)[slot]) for column in expected}
                assert found == expected, (name, where)
            assert states.seeded[slot] == (given["seed"] is not None)
            assert states.shadowed[slot] == request["shadowed"]
            row = states.requests[slot]
            assert (row.is_stocks, row.shadowed) == (request["by_stock"], request["shadowed"])
            penalties = self.sampler.penalties_state
            for column in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
                assert getattr(penalties, column).np[slot] == given[column], (name, column)
        filters = states.filters(np.array(slots, int))
        assert filters.top_k == any(states.top_k.np[slot] < VOCABULARY for slot in slots)


def _word(value):
    """Return a plain number, an integer as the 64-bit word that it stands for."""
    number = value.item()
    return number % 2**64 if isinstance(number, int) else number


@pytest.mark.parametrize("seed", range(3))
def test_table_is_that_of_plain_dictionaries_after_every_step(config, seed):
    """3 walks of 500 steps of four things each."""
    table = Table(config, seed)
    table.walk()
    assert min(table.done.values()) > 50
    assert len(table.done) == len(ACTS)
    for name in table.running():
        table.table.remove_request(name)
    assert sorted(table.table.free_indices) == list(range(SLOTS))
    assert len(table.states._arms) == table.name


def _keep_salt(self, slot, params):
    salt = self.salt.np[slot]
    done = SlotStates.add_request(self, slot, params)
    self.salt.np[slot] = salt
    return done


def _decide_again(self, slot, params):
    self._arms.clear()
    return SlotStates.add_request(self, slot, params)


def _keep_shadow(self, slot, params):
    shadowed = self.shadowed[slot]
    done = SlotStates.add_request(self, slot, params)
    self.shadowed[slot] |= shadowed
    return done


@pytest.mark.parametrize("broken", [_keep_salt, _decide_again, _keep_shadow], ids=lambda broken: broken.__name__)
def test_walk_notices_slots_that_keep_or_lose_something(config, broken):
    table = Table(config, 0)
    table.states.add_request = broken.__get__(table.states)
    with pytest.raises(AssertionError):
        table.walk()
