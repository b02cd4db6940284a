"""The sampler of runner V2 on vLLM's real classes, by every backend, in Triton's interpreter (`tests/v2`)."""

from tests.interpreted import ROOT, run


def test_checks_of_runner_v2_pass_in_the_interpreter():
    """`python -m pytest tests/v2/check_*.py`, with the variables of `tests/interpreted.py`, runs them by hand."""
    checks = sorted((ROOT / "tests" / "v2").glob("check_*.py"))
    assert len(checks) >= 4
    output = run("-m", "pytest", "-p", "no:cacheprovider", *checks)
    assert "[100%]" in output
