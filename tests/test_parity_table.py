"""The README's table of what works: its rows are those of the tests, and it shows what failed or did not run."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from scripts import parity_matrix as matrix
from tests.parity.features import ALONE, EQUAL, FEATURES, OWN, REFUSED, SCHEDULE
from tests.parity.pair import same

ROOT = Path(__file__).resolve().parent.parent
NODES = sorted({node for each in FEATURES for node in (*each.tests, each.v2) if node is not None})


@cache
def functions(path):
    """Return the names of the functions of a file."""
    return [each.name for each in ast.parse(path.read_text()).body if isinstance(each, ast.FunctionDef)]


def written(path, *cases):
    """Write a file as pytest does, of (module, name, how it ended), and return its path."""
    parts = [f'<testcase classname="{module}" name="{name}">{ended}</testcase>' for module, name, ended in cases]
    path.write_text(f"<testsuites><testsuite>{''.join(parts)}</testsuite></testsuites>")
    return path


@pytest.mark.parametrize("node", NODES)
def test_test_that_shows_a_feature_exists(node):
    file, function = node.split("::")
    assert function in functions(ROOT / file)


def test_every_feature_is_there_once_and_says_what_was_compared():
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)
    assert {feature.compared for feature in FEATURES} == {ALONE, EQUAL, OWN, SCHEDULE, REFUSED}
    assert all(feature.tests for feature in FEATURES)


def cells(table):
    """Return the rows of a table as lists of cells."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_readme_lists_every_feature_and_nothing_else():
    """With its tests; how they ended is what `scripts/parity_matrix.py` last saw, and none has failed."""
    section = (ROOT / "README.md").read_text().split(f"{matrix.MARKER}\n\n")[1].split("\n\n")[0]
    found, expected = cells(section), cells(matrix.table({}))
    assert [[row[0], row[2].split(":", 1)[-1], *row[3:]] for row in found] == [
        [row[0], row[2].split(":", 1)[-1], *row[3:]] for row in expected
    ], "run scripts/parity_matrix.py"
    assert matrix.FAILED not in section


def test_table_shows_what_failed_and_what_did_not_run(tmp_path):
    """Of a test with several cases the worst; of several files the last that has it."""
    stops, draws = "tests.parity.test_parity_stops", "tests.parity.test_parity_draws"
    first = written(
        tmp_path / "first.xml",
        (stops, "test_max_tokens_is_the_length[1]", ""),
        (stops, "test_max_tokens_is_the_length[2]", "<failure/>"),
        (stops, "test_stop_token_ids_end_both_at_one_place", "<error/>"),
        (draws, "test_top_k_holds_for_both", "<skipped/>"),
        (draws, "test_top_p_holds_for_both", "<failure/>"),
        ("tests.test_v2_sampler", matrix.V2_RUNNER.split("::")[1], ""),
    )
    second = written(tmp_path / "second.xml", (draws, "test_top_p_holds_for_both", ""))
    table = matrix.table(matrix.read_results([first, second]))
    ended = {row[0]: row[1] for row in cells(table)}
    assert ended["`max_tokens`"] == ended["`stop_token_ids`"] == matrix.FAILED
    assert ended["`top_k`"] == ended["`seed`"] == matrix.NOT_RUN
    assert ended["`top_p`"] == matrix.WORKS
    assert re.search(r"\| `top_k` \| not run \| works: `v2/check_draws::test_tokens_are_the_definitions` \|", table)


def test_table_is_put_in_place_of_the_old_one(tmp_path, monkeypatch, capsys):
    """And nothing else of the file is changed; a failed test is an exit code."""
    readme, results = tmp_path / "README.md", written(tmp_path / "none.xml")
    readme.write_text(f"Before\n\n{matrix.MARKER}\n\n| old |\n|---|\n| row |\n\nAfter | this\n")
    monkeypatch.setattr(sys, "argv", [matrix.__file__, "--results", str(results), "--readme", str(readme)])
    assert matrix.main() == 0
    assert readme.read_text() == f"Before\n\n{matrix.MARKER}\n\n{matrix.table({})}\nAfter | this\n"
    assert capsys.readouterr().out == matrix.table({})
    written(results, ("tests.parity.test_parity_stops", "test_max_tokens_is_the_length", "<failure/>"))
    assert matrix.main() == 1
    readme.write_text("no table")
    with pytest.raises(SystemExit, match="2"):
        matrix.main()


@pytest.mark.parametrize(
    "stock",
    [
        {"id": "b", "choices": [{"text": "no", "logprobs": [-0.5, None]}]},
        {"id": "b", "choices": [{"text": "yes", "logprobs": [-0.501, None]}]},
        {"id": "b", "choices": [{"text": "yes", "logprobs": [-0.5]}]},
        {"id": "b", "choices": [{"text": "yes", "logprobs": [-0.5, None], "stop_reason": None}]},
        {"id": "b", "choices": []},
    ],
)
def test_answers_that_differ_anywhere_but_in_their_names_are_told_apart(stock):
    ours = {"id": "a", "choices": [{"text": "yes", "logprobs": [-0.5, None]}]}
    same(ours=ours, stock={"id": "b", "choices": [{"text": "yes", "logprobs": [-0.50001, None]}]})
    with pytest.raises(AssertionError):
        same(ours=ours, stock=stock)
