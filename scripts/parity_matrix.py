#!/usr/bin/env python
"""Writes the README's table of what vLLM can do and whether it can with this sampler, from the results of tests.

    .venv/bin/python scripts/parity_matrix.py                        # runs the tests that the table names, half an hour
    .venv/bin/python scripts/parity_matrix.py --results a.xml b.xml  # takes what `pytest --junitxml` has written

A test that failed or did not run shows so in its row. The exit code is 1 if one failed.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.parity.features import FEATURES, REFUSED, Feature

ROOT = Path(__file__).resolve().parents[1]
MARKER = "<!-- parity -->"
HEAD = ("feature", "V1", "V2", "compared with stock", "test")
WORKS, FAILED, NOT_RUN = "works", "**fails**", "not run"

#: What runs the checks of `tests/v2`, in Triton's interpreter.
V2_RUNNER = "tests/test_v2_sampler.py::test_checks_of_runner_v2_pass_in_the_interpreter"


def runner(node: str) -> str:
    """Return the test of pytest that runs a node."""
    return V2_RUNNER if node.startswith("tests/v2/") else node


def read_results(paths: Iterable[Path]) -> dict[str, str]:
    """Return how each test ended, as file::function; a function ends as the worst of its cases does.

    Of a test that several files have, the last one counts.
    """
    found: dict[str, str] = {}
    for path in paths:
        here: dict[str, str] = {}
        for case in ElementTree.parse(path).iter("testcase"):
            node = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '').split('[')[0]}"
            kinds = {child.tag for child in case}
            ended = FAILED if kinds & {"failure", "error"} else NOT_RUN if "skipped" in kinds else WORKS
            here[node] = worst([here.get(node, WORKS), ended])
        found.update(here)
    return found


def worst(endings: Iterable[str]) -> str:
    """Return the worst of several endings."""
    return max(endings, key=[WORKS, NOT_RUN, FAILED].index)


def row(feature: Feature, results: dict[str, str]) -> tuple[str, ...]:
    """Return the cells of a feature."""
    ended = worst(results.get(test, NOT_RUN) for test in feature.tests)
    if ended == WORKS and feature.compared == REFUSED:
        ended = "refused by vLLM"
    v2 = "not run here"
    if feature.v2 is not None:
        v2 = f"{results.get(runner(feature.v2), NOT_RUN)}: `{short(feature.v2)}`"
    return feature.name, ended, v2, feature.compared, f"`{short(feature.tests[0])}`"


def short(node: str) -> str:
    """Return how the table names a node."""
    return node.removeprefix("tests/").replace(".py::", "::")


def table(results: dict[str, str]) -> str:
    """Return the table in Markdown."""
    lines = [f"| {' | '.join(cells)} |\n" for cells in (HEAD, *(row(feature, results) for feature in FEATURES))]
    lines.insert(1, f"|{'---|' * len(HEAD)}\n")
    return "".join(lines)


def put(readme: str, text: str) -> str:
    """Return a README in which the table after the marker is this one."""
    before, after = readme.split(f"{MARKER}\n\n", 1)
    rest = after.splitlines(keepends=True)
    while rest and rest[0].startswith("|"):
        del rest[0]
    return f"{before}{MARKER}\n\n{text}{''.join(rest)}"


def run_tests(path: Path) -> None:
    """Run every test that the table names, and write how they ended."""
    nodes = dict.fromkeys(runner(node) for each in FEATURES for node in (*each.tests, each.v2) if node is not None)
    pytest = [sys.executable, "-m", "pytest", "-m", "not long"]  # the slow ones too
    subprocess.run([*pytest, f"--junitxml={path}", *nodes], cwd=ROOT, check=False)


def main() -> int:
    """Write the table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, nargs="+", help="files that pytest has written")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="the file with the table")
    arguments = parser.parse_args()
    readme = arguments.readme.read_text()
    if f"{MARKER}\n\n" not in readme:
        parser.error(f"{arguments.readme} has no line '{MARKER}' with an empty line after it")
    with tempfile.TemporaryDirectory() as folder:
        paths = arguments.results
        if paths is None:
            paths = [Path(folder) / "results.xml"]
            run_tests(paths[0])
        results = read_results(paths)
    text = table(results)
    arguments.readme.write_text(put(readme, text))
    print(text, end="")
    return FAILED in text


if __name__ == "__main__":
    sys.exit(main())
