"""How a sampler's name becomes a class: ours, another package's, a registered one, `module:Class`."""

import sys

import pytest
from vllm.v1.sample.sampler import Sampler

from vllm_gumbel import register_sampler
from vllm_gumbel.integration import registry
from vllm_gumbel.integration.registry import SamplerError, check_name, resolve, samplers
from vllm_gumbel.integration.v1 import GumbelSampler

OURS = "vllm_gumbel.integration.v1:GumbelSampler"
THIRD_PARTY = """
import vllm.v1.sample.sampler
class Third(vllm.v1.sample.sampler.Sampler):
    class Inner(vllm.v1.sample.sampler.Sampler):
        pass
class NoSampler:
    pass
function = len
"""


class Another(Sampler):
    pass


@pytest.fixture(autouse=True)
def own_registrations(monkeypatch):
    """Registrations of a test end with it."""
    monkeypatch.setattr(registry, "_registered", {})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder on the import path, with a module `third_party_sampler`, and modules that fail when imported."""
    (tmp_path / "third_party_sampler.py").write_text(THIRD_PARTY)
    (tmp_path / "sampler_that_needs_more.py").write_text("import a_module_that_is_absent\n")
    (tmp_path / "sampler_with_a_typing_error.py").write_text("def f(:\n")
    (tmp_path / "sampler_that_raises.py").write_text("raise RuntimeError('no such device')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def install(folder, package, **names):
    """Write what an installed package leaves of itself: its name, version and entry points."""
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name.replace('_', '-')} = {target}" for name, target in names.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[vllm_gumbel.samplers]", *lines, ""]))


def test_our_own_name_is_our_class():
    assert samplers() == {"gumbel": OURS}
    assert resolve("gumbel") is GumbelSampler


def test_default_is_no_class_of_ours():
    assert check_name("default") == "default"
    assert resolve("default") is None


@pytest.mark.parametrize("function", [check_name, resolve])
@pytest.mark.parametrize("name", ["gumble", "", "Gumbel", "gumbel ", "DEFAULT"])
def test_unknown_name_lists_the_known_ones(function, name):
    register_sampler("another", Another)
    with pytest.raises(SamplerError) as refused:
        function(name)
    known = "default, another, gumbel, or module:Class for one of your own"
    assert str(refused.value) == f"unknown sampler {name!r}; known: {known}"


@pytest.mark.parametrize("cls", [Another, f"{__name__}:Another"])
def test_registered_class_is_found_by_its_name(cls):
    register_sampler("an-other_1.0", cls)
    assert resolve("an-other_1.0") is Another


def test_same_class_may_be_registered_twice():
    """vLLM calls a plugin more than once in some processes."""
    register_sampler("another", Another)
    register_sampler("another", Another)
    register_sampler("another", f"{__name__}:Another")
    assert resolve("another") is Another


def test_other_class_of_the_same_name_is_refused_with_both():
    register_sampler("another", Another)
    with pytest.raises(SamplerError) as refused:
        register_sampler("another", GumbelSampler)
    assert str(refused.value) == f"sampler name 'another' is claimed by {__name__}:Another and {OURS}"
    assert resolve("another") is Another


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a/b", "a\n", "a,b", "a;b"])
def test_malformed_name_cannot_be_registered(name):
    with pytest.raises(SamplerError, match=r"must consist of letters, digits, '-', '_' and '\.', got") as refused:
        register_sampler(name, Another)
    assert repr(name) in str(refused.value)
    assert registry._registered == {}


def test_name_of_the_stock_sampler_cannot_be_registered():
    with pytest.raises(SamplerError, match="'default' is vLLM's own sampler"):
        register_sampler("default", Another)


def test_sampler_of_another_package_is_found(folder):
    install(folder, "third-party", third="third_party_sampler:Third", deep="third_party_sampler:Third.Inner")
    assert set(samplers()) == {"gumbel", "third", "deep"}
    assert resolve("third").__name__ == "Third"
    assert resolve("deep") is resolve("third").Inner


def test_name_claimed_by_two_packages_is_an_error_that_names_both(folder):
    install(folder, "third-party", gumbel="third_party_sampler:Third")
    for function in (samplers, lambda: resolve("gumbel"), lambda: check_name("gumbel")):
        with pytest.raises(SamplerError, match="'gumbel' is claimed twice") as refused:
            function()
        assert "third_party_sampler:Third by package third-party" in str(refused.value)
        assert f"{OURS} by package vllm-gumbel" in str(refused.value)
    assert resolve("third_party_sampler:Third").__name__ == "Third", "the way out that the message names"
    assert resolve("default") is None


def test_name_claimed_by_a_package_and_a_registration_is_an_error_that_names_both():
    register_sampler("gumbel", Another)
    with pytest.raises(SamplerError, match="claimed twice") as refused:
        samplers()
    assert f"{OURS} by package vllm-gumbel" in str(refused.value)
    assert f"{__name__}:Another by register_sampler" in str(refused.value)


def test_same_class_claimed_by_two_packages_is_no_conflict(folder):
    install(folder, "third-party", gumbel=OURS)
    register_sampler("gumbel", GumbelSampler)
    assert resolve("gumbel") is GumbelSampler


def test_package_cannot_claim_the_name_of_the_stock_sampler(folder):
    install(folder, "third-party", default="third_party_sampler:Third")
    with pytest.raises(SamplerError, match="'default' is vLLM's own sampler, and package third-party claims it"):
        samplers()


def test_module_and_class_need_no_name(folder):
    assert resolve("third_party_sampler:Third").__name__ == "Third"
    assert resolve("third_party_sampler:Third.Inner").__qualname__ == "Third.Inner"
    assert resolve("vllm.v1.sample.sampler:Sampler") is Sampler


@pytest.mark.parametrize("attribute", ["NoSampler", "function", "__name__"])
def test_what_is_no_sampler_is_refused(attribute, folder):
    with pytest.raises(SamplerError, match=r"is not a subclass of vllm\.v1\.sample\.sampler\.Sampler") as refused:
        resolve(f"third_party_sampler:{attribute}")
    assert f"third_party_sampler:{attribute}" in str(refused.value)
    install(folder, "third-party", bad=f"third_party_sampler:{attribute}")
    with pytest.raises(SamplerError, match=rf"^sampler 'bad': third_party_sampler:{attribute} is not a subclass"):
        resolve("bad")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("a_module_that_is_absent:Third", "No module named 'a_module_that_is_absent'"),
        ("third_party_sampler:Absent", "has no attribute 'Absent'"),
        ("third_party_sampler:Third.Absent", "has no attribute 'Absent'"),
        ("third_party_sampler:", "has no attribute ''"),
        (":Third", "Empty module name"),
        ("third_party_sampler:Third:Inner", "has no attribute 'Third:Inner'"),
        ("sampler_that_needs_more:Third", "No module named 'a_module_that_is_absent'"),
        ("sampler_with_a_typing_error:Third", "invalid syntax"),
        ("sampler_that_raises:Third", "no such device"),
        (".third_party_sampler:Third", "relative import"),
    ],
)
def test_what_cannot_be_imported_is_refused_with_the_reason(target, reason, folder):
    with pytest.raises(SamplerError) as refused:
        resolve(target)
    assert str(refused.value).startswith(f"sampler {target!r} cannot be imported: ")
    assert reason in str(refused.value)
    assert refused.value.__cause__ is not None, "where it went wrong stays visible"
