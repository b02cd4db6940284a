"""Texts of a tiny model are verified: honest ones match, and what was changed about others is found and named."""

import string

import numpy as np
import pytest

from tests.tiny_llama import VOCAB, write_model, write_text
from vllm_gumbel.evaluate.likelihood_text import fit, verified
from vllm_gumbel.evaluate.logits import PIECE, ModelError, Network
from vllm_gumbel.evaluate.records import Record

TOLERANCE, ALPHA = 0.02, 1e-3
CLAIM = {"temperature": 0.7, "top_p": 0.95}

HONEST = {
    "plain": {},
    "top_k": {"top_k": 8},
    "min_p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3},
    "bias": {"logit_bias": {"65": 4, "66": -3.5}},
    "allowed": {"allowed_token_ids": list(range(60, 130))},
    "bad words": {"bad_words": list(string.printable[:94])},
    "min_tokens": {"min_tokens": 10, "stop_token_ids": list(range(256))[::2]},
    "salt": {"gumbel_salt": 9},
    "preset": {"temperature": 1, "gumbel_preset": "factual"},
    "log_vocab": {"temperature": 0.4, "gumbel_temperature_rule": "log_vocab"},
    "hybrid": {"gumbel_hybrid_steps": 20, "gumbel_noise_scale": 0.8},
    "top_n": {"gumbel_top_n": 5},
    "tail": {"gumbel_tail_boost": 0.2},
    "offset": {"temperature": 0.3, "gumbel_repetition_offset": 2.0},
    "scale": {"gumbel_noise_scale": 0.6},
    "no noise": {"gumbel_noise_scale": 0.0},
    "greedy": {"temperature": 0, "seed": None},
}


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    return Network(write_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def other_network(tmp_path_factory):
    return Network(write_model(tmp_path_factory.mktemp("other"), seed=1))


@pytest.mark.parametrize("name", HONEST)
def test_honest_texts_match_token_for_token(network, name):
    record = write_text(network, 60, **{**CLAIM, "seed": 5, **HONEST[name]})
    one = verified(record, network, 0.001, ALPHA)
    assert one.matched == 60, one
    assert one.verdict in ("matches", "undecided"), one.explanation
    # Where the claim leaves few choices, its tokens say little for it.
    assert one.verdict == "matches" or name in ("no noise", "top_n", "offset", "scale"), one.explanation


def test_parameters_of_the_record_matter(network):
    """Each setting above, left out of the claim, no longer gives the text."""
    for name in HONEST.keys() - {"plain", "greedy", "preset"}:  # the preset is the claim's temperature
        params = {**CLAIM, "seed": 5, **HONEST[name]}
        record = write_text(network, 60, **params, claim={**CLAIM, "seed": 5})
        assert verified(record, network, 0.001, ALPHA).matched < 60, name


def test_stock_noise_matches_and_is_not_ours(network):
    record = write_text(network, 60, **CLAIM, seed=5)
    stock = record.model_copy(update={"noise": "stock", "noise_version": None})
    assert verified(stock, network, TOLERANCE, ALPHA).verdict == "differs"
    from vllm_gumbel.evaluate.likelihood_text import readable
    from vllm_gumbel.evaluate.replayed_text import written

    output = list(written(readable(stock, network), network, 60))
    again = verified(stock.model_copy(update={"output_token_ids": output}), network, TOLERANCE, ALPHA)
    assert (again.matched, again.verdict) == (60, "matches")


@pytest.mark.parametrize(
    ("real", "words"),
    [
        ({"seed": 6}, "another seed"),
        ({"gumbel_salt": 1}, "another seed"),
        ({"temperature": 1.0}, "temperature 1 "),
        ({"temperature": 0}, "greedy choice"),
        ({"top_p": 0.5}, "top_p 0.5"),
        ({"top_k": 10, "top_p": 1.0}, ""),
    ],
)
def test_what_was_drawn_otherwise_is_found_and_named(network, real, words):
    """5 texts of 120 tokens: each differs, and most are explained by what was changed."""
    named = 0
    for seed in range(5):
        rng = np.random.default_rng(seed)
        params = {**CLAIM, "seed": 100 * seed, **real}
        if "seed" in real:
            params["seed"] += 1
        claim = {**CLAIM, "seed": 100 * seed}
        record = write_text(network, 120, **params, claim=claim, disagreement=0.02, rng=rng)
        one = verified(record, network, TOLERANCE, ALPHA)
        assert one.verdict == "differs", (real, one.explanation)
        named += one.explanation.startswith(words)
    assert named >= 4


def test_other_weights_are_found(network, other_network):
    record = write_text(other_network, 120, **CLAIM, seed=3)
    one = verified(record, network, TOLERANCE, ALPHA)
    assert one.verdict == "differs"


def test_rounded_weights_are_found(network, tmp_path):
    """Weights of 3 bits, in groups of 32 with one scale: each lies within half a step of what it was."""
    from safetensors.torch import load_file

    from scripts.rounded_model import GROUP, rounded

    folder = rounded(network.folder, 3, tmp_path / "rounded")
    before, after = (load_file(each / "model.safetensors") for each in (network.folder, folder))
    name = "model.layers.1.mlp.down_proj.weight"
    groups = before[name].reshape(-1, GROUP)
    error = (after[name].reshape(-1, GROUP) - groups).abs().amax(1)
    assert bool((error <= groups.abs().amax(1) / 3 / 2 * 1.001).all())
    assert error.max() > 0
    assert bool((before["lm_head.weight"] == after["lm_head.weight"]).all())
    one = verified(write_text(Network(folder), 200, **CLAIM, seed=3), network, TOLERANCE, ALPHA)
    assert one.verdict == "differs"
    assert one.judgement.alternatives[0].family == "weights"


def test_coarser_logits_are_found_and_measured(network):
    """Logits that differ by 15 times the tolerance; the size named is right within a factor of 3."""
    record = write_text(network, 300, **CLAIM, seed=3, disagreement=0.4, rng=np.random.default_rng(3))
    one = verified(record, network, TOLERANCE, ALPHA)
    assert one.verdict == "differs"
    size = float(one.explanation.split("about ")[1].split(")")[0])
    assert 0.4 / np.pi < size < 1.2  # a normal difference of two ids, against the scale of a logistic one


def test_one_edited_token_is_found_where_it_is(network):
    found = 0
    for seed in range(8):
        record = write_text(network, 80, **CLAIM, seed=seed)
        ids = list(record.output_token_ids)
        ids[40] = next(token for token in (120, 121, 122) if token != ids[40])
        one = verified(record.model_copy(update={"output_token_ids": ids}), network, TOLERANCE, ALPHA)
        found += one.explanation.startswith("text edited near token 40 ")
    assert found >= 6


def test_honest_texts_of_a_coarser_server_raise_no_alarm(network):
    """40 texts with logits off by a normal number of the tolerance's size, alpha 1e-3: 4 alarms would have a chance of
    9e-8 under the claim."""
    rng, alarms = np.random.default_rng(9), 0
    for seed in range(40):
        record = write_text(network, 40, **CLAIM, seed=seed, disagreement=TOLERANCE, rng=rng)
        alarms += verified(record, network, TOLERANCE, ALPHA).verdict == "differs"
    assert alarms < 4


def test_fit_finds_the_disagreement(network):
    """15 texts of 60 tokens: the tolerance of greatest likelihood is right within a factor of 2."""
    rng = np.random.default_rng(10)
    texts = [write_text(network, 60, **CLAIM, seed=seed, disagreement=0.1, rng=rng) for seed in range(15)]
    fitted = fit(texts, network, lambda: None)
    # Two ids differ by a normal number of deviation 0.1 sqrt(2), which a logistic one of scale b has as b pi / sqrt(3).
    expected = 0.1 * np.sqrt(2) * np.sqrt(3) / np.pi
    assert expected / 2 < max(fitted, key=fitted.get) < expected * 2


def test_long_texts_are_fed_in_pieces(network):
    """Logits of a text longer than two pieces are those of the whole."""
    import torch

    rng = np.random.default_rng(11)
    prompt, output = rng.integers(0, 256, 20).tolist(), rng.integers(0, 256, 2 * PIECE + 10).tolist()
    rows = np.stack(list(network.rows(prompt, output)))
    with torch.inference_mode():
        whole = network._model(torch.tensor([prompt + output])).logits[0].numpy()
    np.testing.assert_allclose(rows, whole[19:-1], atol=1e-4)


def test_a_text_longer_than_the_context_is_unreadable(network):
    record = Record(id="long", params={"seed": 1}, prompt_token_ids=[1], output_token_ids=[5] * 700)
    assert "longer than the model's context of 600" in verified(record, network, TOLERANCE, ALPHA).explanation
    with pytest.raises(ModelError, match="context"):
        network.next_rows([1] * 601, network.session())


READABLE = {"id": "r", "prompt_token_ids": [72], "output_token_ids": [73, 74], "params": {"seed": 1}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"params": {}}, "no seed"),
        ({"params": {"seed": -1}}, "no seed"),
        ({"params": {"seed": 2**64}}, "seed must be"),
        ({"params": {"seed": 1.5}}, "seed must be"),
        ({"params": {"seed": 1, "temperature": float("inf")}}, "temperature must be a number"),
        ({"params": {"seed": 1, "top_p": 0}}, "top_p must be"),
        ({"params": {"seed": 1, "top_k": 2.5}}, "top_k must be"),
        ({"params": {"seed": 1, "structured_outputs": {"regex": "a"}}}, "structured_outputs cannot be replayed"),
        ({"params": {"seed": 1, "no_such_thing": 1}}, "no_such_thing cannot be replayed"),
        ({"params": {"seed": 1, "gumbel_no_such": 1}}, "gumbel_no_such"),
        ({"params": {"seed": 1, "gumbel_sampler": "default"}}, "vLLM's own sampler"),
        ({"params": {"seed": 1, "logit_bias": {"x": 1}}}, "logit_bias must map"),
        ({"params": {"seed": 1, "logit_bias": {"300": 1}}}, "below 300"),
        ({"params": {"seed": 1, "allowed_token_ids": 5}}, "must be a list"),
        ({"params": {"seed": 1, "bad_words": [""]}}, "bad_words must hold"),
        ({"params": {"seed": 1, "gumbel_salt": 4}, "noise": "stock"}, "noise is stock"),
        ({"noise": "gumbel", "noise_version": 2}, "noise_version 2 is unknown"),
        ({"output_token_ids": [73, VOCAB]}, "does not match: the output holds id 300"),
        ({"prompt_token_ids": [VOCAB + 5]}, "does not match: the prompt holds id 305"),
        ({"prompt": "Z"}, "does not match: the ids of the prompt read"),
        ({"output": "other"}, "does not match: the ids of the output read"),
        ({"prompt_token_ids": []}, "the prompt has no tokens"),
        ({"prompt_token_ids": None}, "neither ids nor text of the prompt"),
        ({"output_token_ids": None}, "neither ids nor text of the output"),
        ({"error": "503 from the server"}, "there is no text: 503"),
    ],
)
def test_what_cannot_be_verified_is_refused_in_words(network, change, reason):
    one = verified(Record(**{**READABLE, **change}), network, TOLERANCE, ALPHA)
    assert one.verdict == "unreadable"
    assert reason in one.explanation


@pytest.mark.parametrize("text", ["Hello", "sm\u00f6rg\u00e5s \U0001f600", "nul \x00 inside", " spaces "])
def test_texts_without_ids_are_tokenized_and_say_so(network, text):
    record = Record(id="t", prompt=text, output=text, params={"seed": 1})
    one = verified(record, network, TOLERANCE, ALPHA)
    assert len(one.tokens) == len(text.encode())
    assert sum("not recorded" in note for note in one.notes) == 2
    assert any("names no noise" in note for note in one.notes)


def test_an_empty_output_is_undecided(network):
    one = verified(Record(**{**READABLE, "output_token_ids": []}), network, TOLERANCE, ALPHA)
    assert (one.verdict, one.tokens) == ("undecided", ())


def test_padded_ids_are_never_the_claims(network):
    """Ids 258 to 299 are the model's but not the tokenizer's."""
    record = Record(**{**READABLE, "output_token_ids": [VOCAB - 1]})
    one = verified(record, network, TOLERANCE, ALPHA)
    assert (one.matched, one.looks[0].kept, one.looks[0].probability) == (0, False, 0.0)
