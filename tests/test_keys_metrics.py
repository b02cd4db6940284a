"""What keys add to `/metrics`: refused requests by key, the mass that top_n gives up, tokens of vLLM's own sampler."""

import multiprocessing
import os

import numpy as np
import pytest
from vllm import SamplingParams

from tests.recording import make_recorder, step, total
from vllm_gumbel.integration.v1 import GumbelSampler
from vllm_gumbel.metrics import refusals
from vllm_gumbel.metrics.catalogue import FAULTS, REJECTED_PARAMS, SAMPLED_TOKENS, TOP_N_GIVEN_UP
from vllm_gumbel.metrics.exporter import HOST_VARIABLE, PRIVATE_VARIABLE
from vllm_gumbel.params import GumbelParams, ParamsError

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A private folder that this process chose, as a server does that shows metrics."""
    monkeypatch.delenv(HOST_VARIABLE, raising=False)
    monkeypatch.setenv(PRIVATE_VARIABLE, str(tmp_path))
    return tmp_path


def refuse(extra_args, **others):
    with pytest.raises(ParamsError):
        GumbelSampler.validate_params(SamplingParams(**others, extra_args=extra_args))


def test_refused_requests_are_counted_by_key_and_a_made_up_key_has_no_label_of_its_own(folder):
    GumbelSampler.validate_params(SamplingParams(extra_args={"gumbel_salt": 1}))
    assert not list(folder.iterdir()), "nothing is written before something is refused"
    refuse({"gumbel_salt": "x"})
    refuse({"gumbel_salt": 1.5})
    refuse({"gumbel_hybrid_steps": 3}, temperature=0)
    refuse({"gumbel_made_up": 3})
    refuse({"gumbel_made_up_too": 3})
    refuse({}, seed=2**64)
    found = {key: total(folder, REJECTED_PARAMS, key=key) for key in ("seed", *GumbelParams.model_fields, "unknown")}
    assert {key: count for key, count in found.items() if count} == {
        "gumbel_salt": 2,
        "gumbel_hybrid_steps": 1,
        "unknown": 2,
        "seed": 1,
    }
    assert total(folder, REJECTED_PARAMS) == 6
    assert total(folder, REJECTED_PARAMS, key="gumbel_made_up") == 0


def test_nothing_is_counted_where_nobody_shows_it(tmp_path, monkeypatch):
    monkeypatch.delenv(PRIVATE_VARIABLE)
    refuse({"gumbel_salt": "x"})
    assert PRIVATE_VARIABLE not in os.environ, "no folder is made for it"
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_written_does_not_cost_the_client_its_answer(tmp_path, monkeypatch):
    monkeypatch.setenv(PRIVATE_VARIABLE, str(tmp_path / "is" / "missing"))
    refuse({"gumbel_salt": "x"})


def refuse_in_a_process_of_its_own(times):
    """Be an API server that refuses."""
    for _ in range(times):
        refusals.count_refusal("gumbel_salt", ("gumbel_salt",))


def test_api_servers_add_up(folder):
    """vllm#18053: several processes, one folder, in one of them a worker too, whose counts share its file."""
    recorder = make_recorder(folder)
    for times in (2, 3):
        process = SPAWN.Process(target=refuse_in_a_process_of_its_own, args=(times,))
        process.start()
        process.join(120)
        assert process.exitcode == 0
    refuse({"gumbel_salt": "x"})
    recorder.record(step(1, 2, 3, 4, by_stock=range(4)))
    refuse({"gumbel_salt": "x"})
    recorder.record(step(1, 2, by_stock=range(2)))
    assert total(folder, REJECTED_PARAMS, key="gumbel_salt") == 7
    assert total(folder, SAMPLED_TOKENS, arm="default") == 6
    assert total(folder, FAULTS) == 0


def shares(*values):
    """Return what rows gave up; None for a row that does not set `gumbel_top_n`."""
    return np.array([np.nan if value is None else value for value in values])


def test_rows_with_keys_are_counted(folder):
    recorder = make_recorder(folder)
    recorder.record(step(1, 2, 3, 4, 5, by_stock=(0, 2, 3), given_up=shares(None, 0.25, None, None, 0.5)))
    recorder.record(step(1, given_up=shares(0.0)))
    recorder.record(step(1, 2, 3, by_stock=(0,), given_up=shares(None, 0.125, 0.75)), np.array([False, True, False]))
    assert total(folder, SAMPLED_TOKENS, arm="default") == 3
    assert total(folder, SAMPLED_TOKENS, arm="gumbel") == 4
    assert total(folder, TOP_N_GIVEN_UP, "_count") == 4
    assert total(folder, TOP_N_GIVEN_UP, "_sum") == 0.875
    assert total(folder, FAULTS) == 0
