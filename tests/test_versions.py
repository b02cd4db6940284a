"""Which versions of vLLM are served, and what happens under another one."""

import json
import logging

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.worker_base import WorkerWrapperBase

from vllm_gumbel.integration import choice, compat, plugin


@pytest.mark.parametrize("version", ["0.31.0", "0.31.2", "0.32.0+cpu", "0.32.1rc1", "0.33.1", "0.33", "0.33.0.dev5+g1"])
def test_supported_version_is_accepted(version):
    compat.require_supported_version(version)


@pytest.mark.parametrize(
    "version", ["0.30.2", "0.34.0", "1.31.0", "0.3.1", "31", "0", "garbage", "x.y", "0.x", "v0.32.0"]
)
def test_other_version_is_refused_with_the_range(version):
    with pytest.raises(compat.UnsupportedError) as refused:
        compat.require_supported_version(version)
    assert f"supports vLLM 0.31 to 0.33, found {version}:" in str(refused.value)


def test_installed_version_is_supported():
    compat.require_supported_version()
    assert compat.vllm_version().startswith("0.3")


@pytest.fixture
def unsupported(monkeypatch):
    """vLLM says that it is 0.34.0."""
    plugin.register()
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.34.0")


@pytest.fixture
def model(tmp_path):
    """A model's folder, as far as a configuration looks into it."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1}
    config |= {"intermediate_size": 64, "num_attention_heads": 2, "max_position_embeddings": 64, "vocab_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def configured(model, **settings):
    chosen = {"sampler": "gumbel", "sampler_config": settings}
    return EngineArgs(model=model, skip_tokenizer_init=True, additional_config=chosen).create_engine_config()


def test_server_refuses_to_start_and_says_how_it_would(unsupported, model):
    with pytest.raises(compat.UnsupportedError, match=r"found 0\.34\.0.*or set on_unsupported_vllm to 'stock'$"):
        configured(model)


def test_server_that_may_draw_by_stock_starts_with_a_warning(unsupported, model, caplog, monkeypatch):
    """The workers are told so too, whose environment still asks for ours."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    config = configured(model, on_unsupported_vllm="stock")
    assert choice.read(config.additional_config).is_default
    begin = "vllm-gumbel: vLLM's own sampler draws in place of 'gumbel': "
    warnings = {each.getMessage() for each in caplog.records if each.levelno == logging.WARNING}
    (said,) = [each for each in warnings if each.startswith(begin)]
    assert "found 0.34.0" in said
    monkeypatch.setenv("GUMBEL_SAMPLER", "gumbel")
    assert choice.read(config.additional_config).is_default


@pytest.mark.parametrize(("owner", "name"), [(EngineArgs, "create_engine_config"), (WorkerWrapperBase, "init_device")])
def test_vllm_that_lacks_something_is_left_as_it_is(owner, name, caplog, monkeypatch):
    """Nothing is wrapped in part: a flag that chooses, without a worker that obeys, would be a silent fallback."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    flags = EngineArgs.__dict__["add_cli_args"]
    plain = staticmethod(getattr(flags.__func__, "__wrapped__", flags.__func__))
    monkeypatch.setattr(EngineArgs, "add_cli_args", plain)
    monkeypatch.delattr(owner, name)
    plugin.register()
    assert EngineArgs.__dict__["add_cli_args"] is plain
    assert f"lacks what the plugin builds on, so its own sampler draws: {owner.__name__} has no {name}" in caplog.text
    monkeypatch.setenv("GUMBEL_SAMPLER", "gumbel")
    with pytest.raises(compat.UnsupportedError, match=r"^GUMBEL_SAMPLER is set, and vLLM"):
        plugin.register()
