"""Which sampler and backend serve runner V2, what is refused there, and what is refused under V1 because of V2."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from vllm.v1.sample.sampler import Sampler as SamplerV1
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2

from vllm_gumbel.integration import choice, compat, plugin, registry
from vllm_gumbel.integration.registry import SamplerError, resolve, resolve_for_runner
from vllm_gumbel.integration.v2 import GumbelSampler, refuse_unhonoured
from vllm_gumbel.kernels import dispatch
from vllm_gumbel.kernels.slots import Noise
from vllm_gumbel.params import GumbelParams, ParamsError
from vllm_gumbel.settings import parse

OURS = "vllm_gumbel.integration.v2:GumbelSampler"


class OnlyV1(SamplerV1):
    pass


class OnlyV2(SamplerV2):
    pass


class Both(SamplerV1):
    @classmethod
    def for_runner_v2(cls):
        return OnlyV2


class Mistaken(SamplerV1):
    @classmethod
    def for_runner_v2(cls):
        return OnlyV1


@pytest.fixture(autouse=True)
def nothing_is_forced(monkeypatch):
    """Triton is not interpreted, and stays what it is."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(registry, "_registered", {})


def named(cls):
    return f"{__name__}:{cls.__name__}"


def test_class_that_serves_is_that_of_the_runner():
    assert resolve_for_runner(named(Both), v2=False) is Both
    assert resolve_for_runner(named(Both), v2=True) is OnlyV2
    assert resolve_for_runner(named(OnlyV2), v2=True) is OnlyV2
    assert resolve_for_runner(named(OnlyV1), v2=False) is OnlyV1
    assert resolve_for_runner(OURS, v2=True) is resolve_for_runner("gumbel", v2=True) is GumbelSampler
    assert resolve_for_runner("gumbel", v2=False) is resolve("gumbel") is not GumbelSampler
    assert resolve_for_runner("default", v2=True) is resolve_for_runner("default", v2=False) is None
    assert resolve(named(OnlyV2)) is OnlyV2


@pytest.mark.parametrize(
    ("cls", "v2", "said"),
    [
        (
            OnlyV1,
            True,
            "V1 only, and this server would use V2: set VLLM_USE_V2_MODEL_RUNNER=0, or start without",
        ),
        (
            OnlyV2,
            False,
            "V2 only, and this server would use V1: set VLLM_USE_V2_MODEL_RUNNER=1, or start without",
        ),
        (Mistaken, True, "for_runner_v2() returned "),
    ],
)
def test_sampler_without_a_class_for_the_runner_is_refused(cls, v2, said):
    with pytest.raises(SamplerError) as refused:
        resolve_for_runner(named(cls), v2=v2)
    assert str(refused.value).startswith(f"sampler {named(cls)!r}")
    assert said in str(refused.value)


@pytest.fixture
def runners(monkeypatch):
    """Both runners' modules, put back afterwards."""
    monkeypatch.setattr(plugin, "_stock_names", {})
    for module, names in ((gpu_model_runner, ("Sampler", "RejectionSampler")), (model_runner, ("Sampler",))):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(model_runner, "RejectionSampler", model_runner.RejectionSampler)


@pytest.mark.usefixtures("runners")
def test_names_are_replaced_in_the_module_of_the_runner_that_is_used():
    """And are vLLM's own again for the next engine of the process that asks for no other sampler."""
    stock = model_runner.Sampler, model_runner.RejectionSampler, gpu_model_runner.Sampler
    v2 = SimpleNamespace(use_v2_model_runner=True)
    plugin._choose_in_worker(choice.Choice(OURS, parse(None)), v2)
    assert model_runner.Sampler is GumbelSampler
    assert model_runner.RejectionSampler is GumbelSampler.verifier()
    assert gpu_model_runner.Sampler is stock[2]
    plugin._choose_in_worker(choice.Choice(named(OnlyV1), parse(None)), SimpleNamespace(use_v2_model_runner=False))
    assert gpu_model_runner.Sampler is OnlyV1
    assert (model_runner.Sampler, model_runner.RejectionSampler) == stock[:2]
    plugin._choose_in_worker(choice.Choice("default", parse(None)), v2)
    assert (model_runner.Sampler, model_runner.RejectionSampler, gpu_model_runner.Sampler) == stock


#: A configuration that is served, as far as `compat` looks at it.
SERVED = {
    "additional_config": {},
    "speculative_config": None,
    "diffusion_config": None,
    "watermark_config": None,
    "scheduler_config": SimpleNamespace(async_scheduling=True),
    "reasoning_config": SimpleNamespace(enabled=True),
}


def with_settings(**settings):
    return {"additional_config": {"sampler": "gumbel", "sampler_config": settings}}


def drafting(method="standard", **settings):
    return {"speculative_config": SimpleNamespace(rejection_sample_method=method), **with_settings(**settings)}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        with_settings(backend="triton", noise="stock"),
        with_settings(backend="numba"),
        drafting(),  # with asynchronous scheduling and a thinking budget: V2's positions are right on the device
        drafting("block", verification="rejection"),
        drafting("synthetic", verification="rejection"),
    ],
)
def test_what_runner_v2_serves_on_a_gpu_is_accepted(changed):
    compat.require_supported_features_v2(SimpleNamespace(**{**SERVED, **changed}), "cuda")


@pytest.mark.parametrize(
    ("changed", "device", "said"),
    [
        ({"watermark_config": object()}, "cuda", "remove the watermark configuration, or start without --sampler"),
        ({"diffusion_config": object()}, "cuda", "diffusion models, which bring a sampler of their own"),
        (with_settings(backend="triton"), "cpu", "backend 'triton' needs an accelerator; on a CPU, only Triton's"),
        (with_settings(noise="stock"), "cpu", "noise 'stock' needs an accelerator; on a CPU, only Triton's"),
        (with_settings(noise="stock", backend="numba"), "cuda", "noise 'stock' needs backend 'triton', got backend"),
        (drafting("synthetic"), "cuda", "rejection_sample_method 'synthetic' says how to reject them: remove it"),
        (drafting("fly"), "cuda", "or set verification to 'rejection'"),
    ],
)
def test_what_runner_v2_does_not_serve_is_refused_with_the_way_out(changed, device, said):
    with pytest.raises(compat.UnsupportedError, match=r"^sampler 'gumbel'") as refused:
        compat.require_supported_features_v2(SimpleNamespace(**{**SERVED, **changed}), device)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"backend": "triton"}, "backend 'triton'"),
        ({"noise": "stock"}, "noise 'stock'"),
        ({"verification": "rejection"}, "verification 'rejection'"),
    ],
)
def test_what_only_runner_v2_does_is_refused_under_v1(settings, what):
    with pytest.raises(compat.UnsupportedError) as refused:
        compat.require_supported_features(SimpleNamespace(**{**SERVED, **with_settings(**settings)}))
    said = f"sampler 'gumbel' has {what} with vLLM's model runner V2 only, and this server would use V1: "
    assert str(refused.value) == f"{said}remove that setting, or set VLLM_USE_V2_MODEL_RUNNER=1"


@pytest.mark.parametrize(
    ("forced", "device", "noise", "names"),
    [
        ("auto", "cpu", Noise.OWN, ["numba", "reference"]),
        ("auto", "cuda", Noise.OWN, ["triton", "numba", "reference"]),
        ("auto", "cuda", Noise.STOCK, ["triton"]),
        ("triton", "cuda", Noise.STOCK_FP64, ["triton"]),
        ("numba", "cuda", Noise.OWN, ["numba"]),
        ("reference", "cpu", Noise.OWN, ["reference"]),
    ],
)
def test_backends_of_slots_are_tried_in_this_order(forced, device, noise, names):
    assert dispatch.candidates(forced, device=device, noise=noise) == names


def test_interpreter_lets_triton_draw_on_a_cpu_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.candidates("triton", device="cpu", noise=Noise.OWN) == ["triton"]
    assert dispatch.candidates("auto", device="cpu", noise=Noise.STOCK) == ["triton"]
    assert dispatch.candidates("auto", device="cpu", noise=Noise.OWN) == ["numba", "reference"]


def test_unknown_backend_of_slots_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown backend 'cuda'; known: auto, triton, numba, reference"):
        dispatch.candidates("cuda", device="cuda", noise=Noise.OWN)


def test_forced_backend_that_is_missing_is_an_error_and_an_automatic_choice_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(dispatch.DEVICE_BACKENDS, "triton", "vllm_gumbel.no_such")
    with pytest.raises(ImportError):
        dispatch.choose_for_slots("triton", device="cuda")
    with pytest.raises(ImportError, match="no backend can be loaded: triton is missing"):
        dispatch.choose_for_slots("auto", device="cuda", noise=Noise.STOCK)
    backend = dispatch.choose_for_slots("auto", device="cuda")
    assert backend.name == "numba"
    assert backend.host is not None
    assert backend.reason.startswith("triton is missing (")
    assert backend.reason.endswith("); numba is the first backend that loads")


def test_key_that_runner_v2_does_not_honour_is_refused():
    """Never passed over in silence."""
    refuse_unhonoured(GumbelParams(gumbel_salt=3, gumbel_preset="factual", gumbel_top_n=5))
    refuse_unhonoured(GumbelParams(gumbel_noise_scale=1.0, gumbel_sampler="default", gumbel_hybrid_steps=0))
    for key, value in {
        "gumbel_hybrid_steps": 1,
        "gumbel_tail_boost": 0.5,
        "gumbel_repetition_offset": 0.1,
        "gumbel_noise_scale": 0.5,
        "gumbel_return_info": True,
    }.items():
        said = re.escape(f"{key} has an effect under vLLM's model runner V1 only, got {value!r}")
        with pytest.raises(ParamsError, match=f"^{said}$"):
            refuse_unhonoured(GumbelParams(gumbel_salt=3, **{key: value}))


@pytest.mark.parametrize(
    "defaults",
    [
        {},
        {"gumbel_preset": "calm", "gumbel_top_n": 5},
        {"gumbel_noise_scale": 1.0, "gumbel_temperature_rule": "log_vocab"},
    ],
)
def test_default_of_a_key_that_runner_v2_honours_is_accepted(defaults):
    settings = with_settings(presets={"calm": 0.3}, request_defaults=defaults)
    GumbelSampler.check_config(SimpleNamespace(**{**SERVED, **settings}))


@pytest.mark.parametrize(
    ("key", "value"), [("gumbel_hybrid_steps", 3), ("gumbel_noise_scale", 0.5), ("gumbel_return_info", True)]
)
def test_default_of_a_key_that_runner_v2_does_not_honour_is_refused_at_start_up(key, value):
    """Or every request would be a 400."""
    settings = with_settings(request_defaults={"gumbel_top_n": 5, key: value})
    with pytest.raises(compat.UnsupportedError) as refused:
        GumbelSampler.check_config(SimpleNamespace(**{**SERVED, **settings}))
    assert str(refused.value) == (
        f"sampler 'gumbel': request_defaults: {key} has an effect under vLLM's model runner V1 only, got {value!r}: "
        "remove it, or set VLLM_USE_V2_MODEL_RUNNER=0"
    )


def test_frontend_learns_the_class_without_loading_runner_v2():
    """An API server on a machine without Triton resolves samplers of V1."""
    resolved = "import sys; from vllm_gumbel.integration import registry; registry.resolve('gumbel')"
    code = f"{resolved}; print('vllm.v1.worker.gpu.sample.sampler' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split()[-1] == "False"
