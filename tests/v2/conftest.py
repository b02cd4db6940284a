"""What the checks of runner V2 share; `tests/test_v2_sampler.py` runs them in the interpreter."""

import pytest


@pytest.fixture(scope="session")
def config(model_path):
    """vLLM's configuration for the default model under runner V2."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=str(model_path), dtype="float32", enforce_eager=True, max_model_len=64)
    config = config.create_engine_config()
    assert config.use_v2_model_runner
    return config
