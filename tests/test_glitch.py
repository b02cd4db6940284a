"""Glitch tokens: those that are planted in small models are found and no others, and in a real one they are real."""

import functools
import json
import logging
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.planted import (
    CONTROL,
    END,
    HOLE,
    NAME,
    ROWS,
    STOP,
    TWIN,
    UNREACHABLE,
    UNUSED,
    WIDTH,
    ZERO,
    matrix,
    write_model,
)
from vllm_gumbel.cli import main
from vllm_gumbel.metrics import glitch
from vllm_gumbel.metrics.embedding import Embedding, EmbeddingError
from vllm_gumbel.metrics.glitch import GlitchError, find


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vllm-gumbel"


@pytest.fixture
def folder(tmp_path):
    """A function that writes a planted model and returns its folder; see `write_model`."""
    return functools.partial(write_model, tmp_path / "model")


@pytest.fixture(scope="module")
def of_default_model(model_path, tmp_path_factory):
    """The glitch tokens of the default model, made anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return find(model_path)


def test_tied_model_shows_exactly_what_was_planted(folder):
    found = find(folder())
    assert found.undertrained == sorted([TWIN, ZERO])
    assert found.unreachable == sorted([UNREACHABLE, HOLE])
    assert found.special == [CONTROL]
    assert (found.tied, found.vocab) == (True, ROWS)
    assert found.references == len(UNUSED)
    assert found.texts == {TWIN: "K", ZERO: "Q", UNREACHABLE: "zq", HOLE: "", CONTROL: "<control>"}
    assert found.indicators[TWIN] < 0.1
    assert found.indicators[ZERO] < 0.01
    assert found.partial == 128  # every byte of 128 and above


def test_untied_model_is_judged_by_the_lengths_of_its_rows_alone(folder):
    found = find(folder(config={"tie_word_embeddings": False}))
    assert (found.undertrained, found.references, found.tied) == ([ZERO], 0, False)
    assert found.unreachable == sorted([UNREACHABLE, HOLE])


@pytest.mark.parametrize(("more", "tied"), [({}, True), ({"lm_head.weight": torch.ones(3, 3)}, False)])
def test_model_that_does_not_say_is_tied_if_it_has_no_output_matrix(folder, more, tied):
    assert find(folder(config={"tie_word_embeddings": None}, **more)).tied is tied


def test_text_model_within_a_larger_one_is_read(folder):
    """The embedding with most rows, and what the inner configuration says."""
    config = {"tie_word_embeddings": None, "text_config": {"tie_word_embeddings": False, "eos_token_id": CONTROL}}
    more = {"vision.embeddings.weight": torch.ones(9, WIDTH), "vision.head.embeddings.weight": torch.ones(ROWS + 1)}
    found = find(folder(config=config, name="model.language_model.embed_tokens.weight", **more))
    assert (found.tied, found.vocab, found.special) == (False, ROWS, [])


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float64, "transformer.wte.weight"),
        (torch.float32, "gpt_neox.embed_in.weight"),
        (torch.float16, "tok_embeddings.weight"),
        (torch.bfloat16, "transformer.word_embeddings.weight"),
    ],
)
def test_every_name_and_plain_dtype_is_read(folder, dtype, name):
    path = folder(dtype=dtype, name=name)
    weights = torch.tensor(matrix(), dtype=dtype).float().numpy()
    embedding = Embedding(path)
    assert np.array_equal(np.concatenate(list(embedding.blocks())), weights)
    assert np.array_equal(embedding.take([5, 2]), weights[[5, 2]])
    assert np.allclose(embedding.lengths(), np.sqrt((weights.astype(float) ** 2).sum(axis=1)), rtol=1e-6)


def test_model_of_several_files_equals_that_of_one(folder):
    path = folder()
    whole = find(path)
    (path / "model.safetensors").unlink()
    save_file({"model.norm.weight": torch.ones(3)}, path / "model-00001-of-00002.safetensors")
    weights = torch.tensor(matrix(), dtype=torch.bfloat16)
    save_file({NAME: weights}, path / "model-00002-of-00002.safetensors")
    split = find(path)
    assert split.fingerprint != whole.fingerprint
    assert (split.undertrained, split.indicators) == (whole.undertrained, whole.indicators)


def test_matrix_is_the_same_in_many_blocks(folder, monkeypatch):
    path = folder()
    one, component = find(path), Embedding(path).first_component()
    monkeypatch.setattr("vllm_gumbel.metrics.embedding.BLOCK_ROWS", 7)
    assert np.abs(Embedding(path).first_component() @ component) > 1 - 1e-6
    assert np.concatenate(list(Embedding(path).blocks())).shape == (ROWS, WIDTH)
    assert glitch._find(path, one.fingerprint, lambda share: None).undertrained == one.undertrained


def test_first_component_is_that_of_the_covariance(folder):
    """One direction of four times the spread of the others, beside a mean that is larger than all of them."""
    generator = np.random.default_rng(1)
    direction = generator.standard_normal(WIDTH)
    direction /= np.linalg.norm(direction)
    rows = generator.standard_normal((ROWS, WIDTH)) + 4 * generator.standard_normal((ROWS, 1)) * direction + 30
    path = folder(weights=rows, dtype=torch.float32)
    values, vectors = np.linalg.eigh(np.cov(rows.T))
    assert values[-1] > 4 * values[-2]
    assert abs(Embedding(path).first_component() @ vectors[:, -1]) > 1 - 1e-5


def test_unused_ids_that_do_not_agree_give_no_direction(folder):
    """Control tokens that were trained after all, say: every row is ordinary, so only lengths speak."""
    found = find(folder(weights=matrix(unused=[])))
    assert (found.undertrained, found.references) == ([ZERO], 0)


@pytest.mark.parametrize(("share", "others"), [(1 / 3, matrix(unused=[])), (2 / 3, np.zeros((ROWS, WIDTH)))])
def test_unused_ids_that_look_otherwise_do_not_bend_the_direction(folder, share, others):
    """Control tokens that were trained after all, or rows of zeros past the tokenizer."""
    weights, some = matrix(), UNUSED[: round(share * len(UNUSED))]
    weights[some] = others[some]
    found = find(folder(weights=weights))
    assert found.references == len(UNUSED) - len(some)
    assert found.undertrained == sorted([TWIN, ZERO])


def test_tokens_without_a_space_are_reachable_where_texts_begin_with_one(folder):
    """The text of `b` alone is tokenised to the token of space and b; after a bracket it is `b`."""
    tokens = ["<unk>", "▁", "a", "b", "(", "▁a", "▁b", "▁(", "never", "\n"]
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[("▁", "a"), ("▁", "b"), ("▁", "(")],
        unk_token="<unk>",
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    rows = np.random.default_rng(0).standard_normal((len(tokens), WIDTH))
    found = find(folder(weights=rows, tokenizer=tokenizer, config={"eos_token_id": 0}))
    assert tokenizer.encode("b").tokens == ["▁b"]
    assert found.texts == {8: "never"}
    assert found.unreachable == [8]


def test_every_id_that_ends_a_text_is_no_glitch(folder):
    found = find(folder(config={"eos_token_id": CONTROL}))
    assert found.special == []


def test_mask_has_the_width_that_is_asked_for(folder):
    found = find(folder())
    listed = sorted([*found.unreachable, *found.undertrained, *found.special])
    assert np.flatnonzero(found.mask(ROWS)).tolist() == listed
    assert np.flatnonzero(found.mask(ROWS + 50)).tolist() == listed
    assert found.mask(ROWS + 50).shape == (ROWS + 50,)
    assert np.flatnonzero(found.mask(260)).tolist() == [index for index in listed if index < 260]


def test_progress_goes_from_the_start_to_the_end(folder):
    shares = []
    find(folder(), shares.append)
    assert len(shares) > 5
    assert shares == sorted(shares)
    assert shares[-2:] == [1.0, 1.0]


def test_list_is_cached_until_a_file_of_the_model_changes(folder, cache, monkeypatch):
    path = folder()
    first = find(path)
    assert [file.name for file in cache.iterdir()] == [f"glitches-{first.fingerprint}.json"]
    monkeypatch.setattr(glitch, "_find", lambda *_: pytest.fail("it was made again"))
    assert find(path) == first
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    assert find(path).special == [STOP, CONTROL]
    monkeypatch.setattr(glitch, "RULE_VERSION", glitch.RULE_VERSION + 1)
    assert find(path).fingerprint not in (first.fingerprint, None)
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("content", ["", "[]", '{"texts": {}}', '{"texts": 5, "indicators": {}}', "\0"])
def test_damaged_cache_is_made_anew(folder, cache, caplog, content):
    path = folder()
    first = find(path)
    (file,) = cache.iterdir()
    file.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert find(path) == first
    assert "damaged" in caplog.text
    assert json.loads(file.read_text())["vocab"] == ROWS


def test_cache_that_cannot_be_written_is_said_and_does_no_harm(folder, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert find(folder()).special == [CONTROL]
    assert "cannot be cached" in caplog.text


def without(name):
    return lambda path: (path / name).unlink()


def containing(name, content):
    return lambda path: (path / name).write_bytes(content)


def cut_short(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def quantised(path):
    codes = torch.zeros((ROWS, WIDTH), dtype=torch.int8)
    save_file({NAME: codes}, path / "model.safetensors")


def without_embedding(path):
    save_file({"model.norm.weight": torch.ones(5)}, path / "model.safetensors")


def filled_with(value):
    weights = torch.full((ROWS, WIDTH), value)
    return lambda path: save_file({NAME: weights}, path / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without("config.json"), "config.json cannot be read"),
        (containing("config.json", b"{"), "config.json cannot be read"),
        (containing("config.json", b"[1]"), "config.json holds no JSON object"),
        (containing("config.json", b"\xff\xfe"), "config.json cannot be read"),
        (containing("generation_config.json", b"{"), "generation_config.json cannot be read"),
        (without("model.safetensors"), "holds no embedding in safetensors"),
        (without_embedding, "holds no embedding in safetensors"),
        (containing("model.safetensors", b""), "model.safetensors cannot be read"),
        (containing("model.safetensors", b"\xff" * 64), "model.safetensors cannot be read"),
        (cut_short, "model.safetensors cannot be read"),
        (quantised, r"is quantised \(I8\)"),
        (filled_with(0.0), "no numbers that a model could work with"),
        (filled_with(float("nan")), "no numbers that a model could work with"),
        (filled_with(float("inf")), "no numbers that a model could work with"),
        (lambda path: [without(name)(path) for name in ("tokenizer.json", "tokenizer_config.json")], "no tokenizer"),
        (containing("tokenizer.json", b"{}"), "no tokenizer"),
    ],
)
def test_model_that_cannot_be_read_is_refused_in_clear_words(folder, cache, damage, said):
    path = folder()
    damage(path)
    with pytest.raises(GlitchError, match=said):
        find(path)
    assert not cache.exists()


def test_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(GlitchError, match="is no folder"):
        find(tmp_path / "nowhere")


def test_missing_library_names_the_command_that_gets_it(folder, monkeypatch):
    path = folder()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(EmbeddingError, match=r"vllm-gumbel\[model\]"):
        Embedding(path)


def test_default_model_has_the_glitch_tokens_that_its_training_left(of_default_model):
    """Names of classes and programs that its tokenizer saw and its training did not; words of a child are none."""
    assert {" InstancePreprocess", "ManagementPlaneProtection", "swigfaiss", " questionna"} <= {
        of_default_model.texts[index] for index in of_default_model.undertrained
    }
    assert 20 <= len(of_default_model.undertrained) <= 50
    assert of_default_model.unreachable == []
    assert of_default_model.special == [0, 1, *range(3, 17)]


def test_default_model_cannot_repeat_its_glitch_tokens_and_can_repeat_others(of_default_model, model_path):
    """After four times the token and a comma, no glitch token gets 1%, and half of 20 others get 5% or more."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    (comma,) = AutoTokenizer.from_pretrained(model_path)(",")["input_ids"]
    glitches, ordinary = of_default_model.undertrained, np.flatnonzero(~of_default_model.mask(49_152))
    ids = [*glitches, *np.random.default_rng(0).choice(ordinary, 20, replace=False).tolist()]
    with torch.inference_mode():
        laws = network(torch.tensor([[index, comma] * 4 for index in ids])).logits[:, -1].softmax(-1)
    repeated = laws[range(len(ids)), ids].numpy()
    assert repeated[: len(glitches)].max() < 0.01
    assert np.median(repeated[len(glitches) :]) > 0.05


@pytest.fixture
def prepared(cache, model_path, of_default_model):
    """The default model and its list, in the cache of this test."""
    cache.mkdir(parents=True)
    (cache / model_path.name).symlink_to(model_path)
    glitch._save(of_default_model, cache / f"glitches-{of_default_model.fingerprint}.json")


@pytest.mark.usefixtures("prepared")
def test_command_prints_a_table_of_the_default_model(capsys, of_default_model):
    assert main(["glitch"]) == 0
    printed = capsys.readouterr().out
    more = len(of_default_model.undertrained) - 20
    assert f"49,152 ids: {20 + more} undertrained, 0 unreachable, 16 special" in printed
    assert "'PlaneProtection'" in printed
    assert f"{more} more; --all shows them." in printed
    assert "' SysCall'" not in printed
    assert main(["glitch", "--all"]) == 0
    everything = capsys.readouterr().out
    assert all(f" {index} " in everything for index in of_default_model.undertrained)
    assert "--all" not in everything


def test_command_prints_json_that_holds_everything(folder, capsys):
    path = folder()
    assert main(["glitch", str(path), "--json"]) == 0
    printed, found = json.loads(capsys.readouterr().out), find(path)
    for kind in ("unreachable", "undertrained", "special"):
        assert sorted(entry["id"] for entry in printed[kind]) == getattr(found, kind)
        for entry in printed[kind]:
            assert (entry["text"], entry["indicator"]) == (found.texts[entry["id"]], found.indicators[entry["id"]])
    assert (printed["model"], printed["vocab"], printed["tied"]) == (str(path), ROWS, True)


@pytest.mark.parametrize(
    ("config", "unused", "said"),
    [
        ({}, UNUSED, "tied embedding was judged by its direction and length, after 22 ids"),
        ({}, [], "tied embedding was judged by the lengths of its rows, since no ids"),
        ({"tie_word_embeddings": False}, UNUSED, "untied embedding was judged by the lengths of its rows."),
    ],
)
def test_command_says_by_what_ids_were_judged(folder, capsys, config, unused, said):
    assert main(["glitch", str(folder(config=config, weights=matrix(unused=unused)))]) == 0
    assert said in capsys.readouterr().out.replace("\n", " ")


def test_command_refuses_in_one_line(tmp_path, capsys):
    assert main(["glitch", str(tmp_path / "nowhere")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"vllm-gumbel glitch: {tmp_path / 'nowhere'} is no folder\n"
