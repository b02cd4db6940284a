"""What the repository says about itself is true."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from vllm_gumbel.metrics.catalogue import CATALOGUE
from vllm_gumbel.params import GumbelParams
from vllm_gumbel.settings import SamplerSettings

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "vllm_gumbel"
README = (ROOT / "README.md").read_text()
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(module):
    """Return the top-level packages and dotted modules that a file imports anywhere."""
    return set(re.findall(r"^\s*(?:from|import) ([\w.]+)", module.read_text(), re.MULTILINE))


def readme_table(name):
    """Return the first cells, without backticks, of the README's table after a marker."""
    section = README.split(f"<!-- {name} -->")[1].split("\n#")[0]
    rows = [line.split("|")[1].strip(" `") for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def test_top_level_holds_only_what_it_should():
    allowed = {"pyproject.toml", "README.md", "vllm_gumbel", "tests", "deploy", "scripts"}
    tops = {path.split("/")[0] for path in TRACKED}
    assert {top for top in tops if not top.startswith(".")} <= allowed


@pytest.mark.parametrize("module", [*MODULES, *sorted((ROOT / "tests").glob("*.py"))], ids=lambda m: m.name)
def test_no_module_is_longer_than_400_lines(module):
    assert len(module.read_text().splitlines()) <= 400


def test_only_integration_imports_vllm():
    offenders = [
        str(module.relative_to(ROOT))
        for module in MODULES
        if module.parent.name != "integration" and any(re.match(r"vllm(\.|$)", name) for name in imports(module))
    ]
    assert offenders == []


@pytest.mark.parametrize("folder", ["kernels", "metrics"])
def test_mathematics_and_metrics_do_not_import_upwards(folder):
    allowed = {"kernels": ("kernels", "cache"), "metrics": ("metrics", "kernels", "cache", "settings")}[folder]
    for module in (PACKAGE / folder).glob("*.py"):
        ours = [name.split(".")[1] for name in imports(module) if name.startswith("vllm_gumbel.")]
        assert set(ours) <= set(allowed), module


def test_importing_the_package_loads_neither_torch_nor_vllm():
    code = "import sys, vllm_gumbel; print([m for m in ('torch', 'vllm', 'numpy', 'pydantic') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert result.stdout.strip() == "[]"


def test_readme_tree_lists_every_module_and_folder_and_nothing_else():
    tree = README.split("## How it is built")[1].split("```")[1]
    listed = {line.split()[0].strip("/") for line in tree.splitlines() if line.startswith("  ")}
    present = {m.name for m in PACKAGE.glob("*.py")} | {m.parent.name for m in PACKAGE.glob("*/__init__.py")}
    assert listed == present
    for top in re.findall(r"^(\S+?)/?\s", tree, re.MULTILINE):
        assert (ROOT / top).exists(), top


def test_readme_tables_name_every_setting_parameter_and_metric():
    assert readme_table("settings") == list(SamplerSettings.model_fields)
    assert readme_table("params") == list(GumbelParams.model_fields)
    assert readme_table("metrics") == [metric.exposed_name for metric in CATALOGUE]


def test_readme_settings_show_environment_variable_default_and_description():
    for row in SamplerSettings.table():
        assert "| " + " | ".join((f"`{row[0]}`", f"`{row[1]}`", f"`{row[2]}`", row[3])) + " |" in README


def test_readme_commands_exist_and_run_as_scripts():
    for command in re.findall(r"^(scripts/\w+)", README, re.MULTILINE):
        assert (ROOT / command).stat().st_mode & 0o111, command
    assert "scripts/test" in (ROOT / ".ci" / "run").read_text()


def test_supported_versions_agree():
    from vllm_gumbel.integration.compat import SUPPORTED

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (first, last) = (f"0.{minor}" for _, minor in SUPPORTED)
    assert project["optional-dependencies"]["vllm"] == [f"vllm>={first},<0.{SUPPORTED[1][1] + 1}"]
    assert f"{first}, 0.32 or {last}" in README


def test_ledger_names_everything_that_is_wrapped_or_replaced():
    source = (PACKAGE / "integration" / "plugin.py").read_text()
    ledger, code = source.split('"""', 2)[1:]
    wrapped = re.findall(r'\(\w+, "(\w+)", _', code) + re.findall(r'_wrap\(\w+, "(\w+)", partial', code)
    assert len(wrapped) >= 6
    for name in wrapped:
        assert name in ledger, name
    replaced = re.findall(r'_replace\(\w+, "(\w+)"', code)
    assert replaced
    for name in replaced:
        assert f"`{name}`, name replaced" in ledger, name


def test_nothing_names_this_machine_or_a_package_registry():
    text = {path: (ROOT / path).read_text(errors="replace") for path in TRACKED if (ROOT / path).is_file()}
    index = "download.pytorch." + "org"
    for path, content in text.items():
        assert not re.search(r"/(work|opt/(wheels|pypi))/|pypi\." + r"org|files\.python" + "hosted", content), path
        assert content.count(index) == (path == "scripts/setup"), path


def test_tests_that_the_readme_names_exist():
    named = set(re.findall(r"`((?:\w+/)?(?:test|check)_\w+)::(\w+)`", README))
    assert len(named) > 100
    files = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    for file, function in named:
        assert f"\ndef {function}(" in files[file.rpartition("/")[2]], f"{file}::{function}"
