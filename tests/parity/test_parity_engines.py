"""What an engine fixes at its start: the four modes of logprobs, and drafts of a model; as stock's engine."""

import json
import os
import subprocess
import sys

import pytest

from tests.parity.engines import ASKED, MODES, SEEDED
from tests.parity.models import VOCAB, write_small_model
from tests.parity.pair import same
from tests.serving import ROOT


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What `tests/parity/engines.py` wrote."""
    folder = tmp_path_factory.mktemp("engines")
    model, drafter = (write_small_model(folder / str(seed), seed) for seed in range(2))
    command = [sys.executable, "-m", "tests.parity.engines", model, drafter, folder / "outputs.json"]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("GUMBEL_")}
    environment = {**inherited, "PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads((folder / "outputs.json").read_text())


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("mode", MODES)
def test_logprobs_of_every_mode_are_stocks(outputs, mode, asked):
    """Where noise decides nothing: greedy requests, filters that leave one id, an id far above all others."""
    stock, ours = (outputs["logprobs"][f"{mode}, {sampler}"][asked] for sampler in ("default", "gumbel"))
    assert any(each["logprobs"] or each["prompt"] for each in ours)
    for mine, theirs in zip(ours, stock, strict=True):
        same(ours=mine, stock=theirs, where=f"{mode}, {asked}")


def test_all_logprobs_are_all(outputs):
    for answer in outputs["logprobs"]["raw_logprobs, gumbel"]["all"]:
        assert [len(place) for place in answer["logprobs"]] == [VOCAB] * 4


def test_drafts_of_a_model_are_accepted_and_rejected(outputs):
    """It drafts the best token, which is right for two of five requests where it drafts for itself."""
    for name, least in (("drafts of the model itself", 0.1), ("drafts of another model", 0.0)):
        found = outputs["drafts"][name]
        drafted, accepted = (found[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
        assert least * drafted <= accepted < drafted


@pytest.mark.parametrize("name", ["drafts of the model itself", "drafts of another model"])
def test_drafts_of_a_model_change_no_token_and_no_logprob(outputs, name):
    """Greedy, seeded, filtered, penalised and with bad words."""
    same(ours=outputs["drafts"][name]["answers"], stock=outputs["drafts"]["no drafts"]["answers"])


def test_greedy_tokens_with_drafts_are_stocks(outputs):
    ours = outputs["drafts"]["drafts of another model"]["answers"]
    greedy = [each for i, each in enumerate(ours) if SEEDED[i % len(SEEDED)]["temperature"] == 0]
    for name in ("no drafts, stock", "drafts of another model, stock"):
        stock = outputs["drafts"][name]["answers"]
        assert [each["tokens"] for each in greedy] == [each["tokens"] for each in stock]
