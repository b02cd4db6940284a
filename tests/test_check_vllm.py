"""`scripts/check_vllm`: its table names all that we use of vLLM, and it says what a vLLM lacks, in words."""

import ast
import subprocess
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "check_vllm"
OURS = {path.stem: ast.parse(path.read_text()) for path in (ROOT / "vllm_gumbel" / "integration").glob("*.py")}

#: Fields of vLLM's configuration that hold configurations.
PARTS = {
    "model_config": "vllm.config:ModelConfig",
    "parallel_config": "vllm.config:ParallelConfig",
    "scheduler_config": "vllm.config:SchedulerConfig",
    "speculative_config": "vllm.config:SpeculativeConfig",
}


def load_script():
    """Return the script as a module."""
    loader = SourceFileLoader("check_vllm", str(SCRIPT))
    module = module_from_spec(spec_from_loader("check_vllm", loader))
    sys.modules["check_vllm"] = module  # where its named tuples look for their module
    loader.exec_module(module)
    return module


check_vllm = load_script()
INSTALLED = check_vllm.installed()
SOURCES = check_vllm.Sources(INSTALLED)
ROWS = check_vllm.rows()


def rows_of(file, what):
    """Return the table's rows of a name, or of a class and what it has, on which a file of ours relies."""
    return [row for row in ROWS if file in row.files and (row.what == what or row.what.startswith(f"{what}."))]


def imported(file):
    """Return, name in a file of ours -> "module:name", what it imports from vLLM."""
    return {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in ast.walk(OURS[file])
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm"
        for alias in node.names
    }


def subclasses():
    """Return (file, class, "module:Base") of every class of ours that derives from one of vLLM's."""
    return [
        (file, node, imported(file)[base.id])
        for file, tree in OURS.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if isinstance(base, ast.Name) and base.id in imported(file)
    ]


def names_in(cls):
    """Return what a class of ours defines, and what it assigns to `self`."""
    found = {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
    for node in cls.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found.update(target.id for target in targets if isinstance(target, ast.Name))
    stored = [each for each in ast.walk(cls) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)]
    return found | {each.attr for each in stored if ast.unparse(each.value) == "self"}


def test_installed_vllm_has_everything():
    wrong, known = check_vllm.check(SOURCES)
    assert wrong == []
    assert (known == []) == SOURCES.version().startswith(("0.32", "0.33"))
    assert len(ROWS) > 100


@pytest.mark.parametrize("file", sorted(OURS))
def test_table_has_every_name_that_is_imported(file):
    for what in imported(file).values():
        assert rows_of(file, what), f"{file}.py imports {what}"


def test_table_names_files_that_there_are_and_use_vllm():
    for row in ROWS:
        assert set(row.files) <= set(OURS), row
    assert {file for file in OURS if imported(file)} <= {file for row in ROWS for file in row.files}


@pytest.mark.parametrize(("file", "cls", "base"), subclasses(), ids=lambda each: getattr(each, "name", str(each)))
def test_table_has_what_is_overridden_and_what_is_added(file, cls, base):
    """What vLLM's class has too is overridden; the rest must stay free in vLLM, or one would hide the other."""
    theirs = set(check_vllm.attributes(SOURCES, *base.split(":")))
    free = {name for row in rows_of(file, base) if row.use == "free" for name in check_vllm.words(row.shapes[0])}
    has = {name for row in rows_of(file, base) if row.use == "has" for name in check_vllm.words(row.shapes[0])}
    methods = {row.what.rpartition(".")[2] for row in rows_of(file, base) if row.what != base}
    assert names_in(cls) & theirs <= methods | has
    assert names_in(cls) - theirs - {"__init__"} == free
    called = [
        node.func.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if ast.unparse(node.func.value) == "super()"
    ]
    assert {name for name in called if name in theirs} <= methods


def read_attributes():
    """Yield (file, "module:Class", attribute) of what is read of parameters whose type is one of vLLM's."""
    for file, tree in OURS.items():
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            types = {}
            for argument in function.args.args + function.args.kwonlyargs:
                written = "" if argument.annotation is None else ast.unparse(argument.annotation)
                types[argument.arg] = imported(file).get(written.strip("'\"").removesuffix(" | None"))
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    owner = ast.unparse(node.value)
                    if types.get(owner):
                        yield file, types[owner], node.attr
                    elif (
                        (of := owner.split("."))[1:] and types.get(of[0]) == "vllm.config:VllmConfig" and of[1] in PARTS
                    ):
                        yield file, PARTS[of[1]], node.attr


def test_table_has_every_attribute_that_is_read():
    found = set(read_attributes())
    assert len(found) > 60
    assert {part for _, part, _ in found} >= set(PARTS.values())
    for file, what, name in sorted(found):
        if "torch" in what or name.startswith("__"):
            continue
        has = {
            word for row in rows_of(file, what) for word in (*check_vllm.words(row.shapes[0]), row.what.split(".")[-1])
        }
        assert name in has, f"{file}.py reads {name} of {what}"


def test_table_has_what_is_wrapped_or_replaced():
    wrapped = 0
    for node in ast.walk(OURS["plugin"]):
        name = getattr(getattr(node, "func", None), "id", None)
        if name == "_replace":
            assert any("plugin" in row.files and row.what.endswith(f":{node.args[1].value}") for row in ROWS)
        # A call, or a tuple of what goes to one: class, name of the method, and what wraps it.
        match getattr(node, "args" if name == "_wrap" else "elts", ()):
            case [ast.Name(owner), ast.Constant(str(method)), _, *_]:
                assert rows_of("plugin", f"{imported('plugin')[owner]}.{method}"), method
                wrapped += 1
    assert wrapped == 6


class Changed(check_vllm.Sources):
    """The installed vLLM with a text replaced in one file."""

    def __init__(self, file, old, new):
        self._change = f"vllm/{file}", old, new
        super().__init__(INSTALLED)
        check_vllm.check(SOURCES)  # parses all of them, once
        changed = f"vllm/{file}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.modules = {name: tree for name, tree in SOURCES.modules.items() if name != changed}

    def text(self, file):
        text, (changed, old, new) = super().text(file), self._change
        if file == changed:
            assert old in text
            return text.replace(old, new)
        return text


@pytest.mark.parametrize(
    ("change", "what", "said"),
    [
        (
            ("v1/sample/sampler.py", "predict_bonus_token: bool = False", "bonus: bool"),
            "Sampler.forward (",
            "lacks pred",
        ),
        (("v1/sample/sampler.py", "def apply_penalties", "def penalise"), "Sampler.apply_penalties (", "is not there"),
        (("v1/sample/sampler.py", "class Sampler", "class Drawer"), "v1.sample.sampler:Sampler (name", "is not there"),
        (
            ("v1/sample/logits_processor/builtin.py", "min_toks", "least"),
            "MinTokensLogitsProcessor (",
            "lacks min_toks",
        ),
        (
            ("v1/worker/gpu_model_runner.py", "use_fp64_gumbel=", "fp64="),
            "gpu_model_runner:Sampler (",
            "lacks use_fp64",
        ),
        (("plugins/__init__.py", "vllm.general_plugins", "vllm.plugs"), "vllm.plugins (say", "the text does not have"),
        (("v1/outputs.py", "logprob_token_ids: torch", "token_ids: torch"), "LogprobsTensors (", "lacks logprob_token"),
        (("v1/sample/ops/bad_words.py", "past_tokens_ids", "past"), "apply_bad_words (call", "needs past"),
        (("v1/worker/gpu/sample/gumbel.py", "use_fp64", "exact"), "gumbel_sample (call", "does not take use_fp64"),
        (
            ("v1/worker/gpu_input_batch.py", "self.num_prompt_tokens =", "self.prompts ="),
            "InputBatch (has",
            "lacks num_",
        ),
        (("v1/worker/gpu_input_batch.py", "self._req_ids", "self._rows"), "InputBatch (free", "has _rows now"),
        (("v1/worker/gpu/states.py", "class RequestState", "class State"), "RequestState (has", "is not there"),
    ],
)
def test_change_is_said_in_words(change, what, said):
    wrong, _ = check_vllm.check(Changed(*change))
    assert any(what in line and said in line for line in wrong), wrong


def test_missing_module_is_said():
    class Without(check_vllm.Sources):
        def text(self, file):
            return None if "warmup" in file else super().text(file)

    wrong, _ = check_vllm.check(Without(INSTALLED))
    assert len(wrong) == 2
    assert all("there is no module vllm.v1.worker.gpu.warmup" in line for line in wrong)


# ----------------------------------------------------------------------------------------------------- the command


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """Text of the files that a check reads, by name, as those of a vLLM without anything compiled."""
    sources = check_vllm.Sources(INSTALLED)
    check_vllm.check(sources)
    stems = [name.replace(".", "/") for name in sources.modules]
    files = [file for stem in stems for file in (f"{stem}.py", f"{stem}/__init__.py")]
    return {file: text for file in files if (text := sources.text(file)) is not None}


@pytest.mark.parametrize(
    ("version", "code", "said"), [("0.32.1", 0, " 0 wrong"), ("0.34.0", 1, "supports vLLM 0.31 to 0.33, found 0.34.0")]
)
def test_folder_and_wheel_are_read_without_importing_them(copied, tmp_path, version, code, said):
    files = copied | {f"vllm-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"}
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    for path in (wheel, tmp_path / "unpacked"):
        result = run(path)
        assert (result.returncode, result.stderr) == (code, ""), result
        assert result.stdout.startswith(f"vLLM {version} in {path}; ")
        assert said in result.stdout


def test_what_is_no_vllm_is_a_wrong_use(tmp_path):
    (tmp_path / "a.whl").write_text("not a wheel")
    for arguments in ([tmp_path], [tmp_path / "nowhere"], [tmp_path / "a.whl"], ["--unknown"]):
        result = run(*arguments)
        assert (result.returncode, result.stdout) == (2, "")
        assert "Traceback" not in result.stderr


def test_classes_of_the_installed_vllm_draw():
    result = run("--run")
    assert result.returncode == 0, result
    *_, v1, v2 = result.stdout.splitlines()
    assert v1.startswith("runner V1: 100 tokens are the definition's")
    assert v2.startswith("runner V2: 100 tokens are the definition's")
