"""What keys add to `/metrics`: refused requests by key, the mass that top_n gives up, tokens of vLLM's own sampler."""

import multiprocessing
import os

import pytest
from vllm import SamplingParams

from tests.test_metrics import FAULTS, GIVEN_UP, REJECTED, SAMPLED, make_recorder, total
from vllm_gumbel.integration.v1 import GumbelSampler
from vllm_gumbel.metrics import refusals
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
    found = {key: total(folder, REJECTED, key=key) for key in ("seed", *GumbelParams.model_fields, "unknown")}
    assert {key: count for key, count in found.items() if count} == {
        "gumbel_salt": 2,
        "gumbel_hybrid_steps": 1,
        "unknown": 2,
        "seed": 1,
    }
    assert total(folder, REJECTED) == 6
    assert total(folder, REJECTED, key="gumbel_made_up") == 0


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
    recorder.keyed(4, [])
    refuse({"gumbel_salt": "x"})
    assert total(folder, REJECTED, key="gumbel_salt") == 7
    assert total(folder, SAMPLED, arm="default") == 4


def test_rows_with_keys_are_counted(folder):
    recorder = make_recorder(folder)
    recorder.keyed(3, [0.25, 0.5])
    recorder.keyed(0, [0.0])
    assert total(folder, SAMPLED, arm="default") == 3
    assert total(folder, SAMPLED, arm="gumbel") == 0
    assert total(folder, f"{GIVEN_UP}_count") == 3
    assert total(folder, f"{GIVEN_UP}_sum") == 0.75
    assert total(folder, FAULTS) == 0


@pytest.mark.parametrize("bad", [-1, None])
def test_fault_in_counting_is_counted_and_raises_nothing(folder, bad):
    """vllm#6642: a negative increment, or none at all."""
    recorder = make_recorder(folder)
    recorder.keyed(bad, [0.5])
    assert total(folder, FAULTS) == 1
