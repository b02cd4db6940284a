"""The Triton kernels in Triton's interpreter, against the reference and vLLM's own kernel (`tests/kernels`)."""

import pytest

from tests.interpreted import ROOT, run

CHECKS = sorted((ROOT / "tests" / "kernels").glob("check_*.py"))


def test_there_are_checks():
    assert len(CHECKS) == 5


@pytest.mark.parametrize("check", CHECKS, ids=lambda path: path.stem)
def test_checks_pass_in_the_interpreter(check):
    """`python -m pytest tests/kernels/check_*.py`, with the variables of `tests/interpreted.py`, runs them by hand."""
    assert "[100%]" in run("-m", "pytest", "-p", "no:cacheprovider", check)
