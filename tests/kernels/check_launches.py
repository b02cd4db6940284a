"""What a draw launches is what its plan says, and what it refuses it refuses before."""

import pytest
import torch

from tests.kernels.drawing import draw_in_slots, in_slots
from tests.rows import RowParams
from vllm_gumbel.kernels import sample_triton
from vllm_gumbel.kernels.plan_triton import plan, tiles_for
from vllm_gumbel.kernels.slots import Filters

KERNELS = ("rows", "nucleus", "settle", "cuts", "kept")


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("used", ["", "top_k", "top_p", "min_p", "top_k top_p min_p"])
def test_draw_launches_what_its_plan_says(monkeypatch, used, processed):
    """One launch without a filter, two with a top-k or a min_p, three with a top-p."""
    launched = []
    for name in KERNELS:
        kernel = getattr(sample_triton, f"{name}_kernel")

        def run(*args, _name=name, _run=kernel.run, **kwargs):
            launched.append(_name)
            return _run(*args, **kwargs)

        monkeypatch.setattr(kernel, "run", run)
    filters = Filters(**dict.fromkeys(used.split(), True))
    out = torch.empty(2, 50) if processed else None
    draw_in_slots(torch.zeros(2, 50), RowParams.uniform(2), filters=filters, processed=out)
    assert launched == [launch.kernel for launch in plan(2, 50, 4, filters, processed=processed)]


def test_bytes_of_a_draw_without_filters_are_those_of_the_logits():
    """Within 2%: nothing but the logits is read in full."""
    (launch,) = plan(128, 151_936, 2, Filters())
    assert 1 <= launch.bytes / (128 * 151_936 * 2) < 1.02


def test_tiles_on_a_gpu_depend_on_the_vocabulary_alone():
    tiles = tiles_for(151_936, "cuda")
    assert tiles.parts(151_936) == 38
    assert tiles.groups(151_936) >= 1024
    assert tiles.part % tiles.group == 0


def test_counters_are_left_at_0():
    draw_in_slots(torch.randn(5, 4000), RowParams.uniform(5, top_p=0.5))
    assert all((counters == 0).all() for kept in sample_triton._counters.values() for counters in kept)


def test_no_rows_and_no_ids_are_no_error():
    assert draw_in_slots(torch.empty(0, 5), RowParams.uniform(0)).tokens.shape == (0,)
    assert draw_in_slots(torch.empty(2, 0), RowParams.uniform(2)).tokens.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"logits": torch.zeros(2, 3, dtype=torch.float64)}, TypeError, "float64"),
        ({"logits": torch.zeros(6)}, ValueError, "rows, vocab"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, TypeError, "slots must be torch.int32"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, ValueError, "positions must have shape"),
        ({"usable_vocab": 0}, ValueError, "usable_vocab"),
        ({"processed": torch.zeros(2, 4)}, ValueError, "processed must have shape"),
        ({"params": {"top_k": torch.zeros(5, dtype=torch.int64)}}, TypeError, "top_k must be torch.int32"),
        ({"params": {"seed": torch.zeros(5, dtype=torch.int64)}}, ValueError, "seed must have shape"),
        ({"params": {"top_p": torch.zeros(8)[::2]}}, ValueError, "top_p must be contiguous"),
    ],
)
def test_arguments_that_break_the_contract_are_refused(change, error, words):
    params = in_slots(RowParams.uniform(2), torch.arange(2).numpy())
    arguments = {
        "logits": torch.zeros(2, 3),
        "slots": torch.zeros(2, dtype=torch.int32),
        "positions": torch.zeros(2, dtype=torch.int64),
        "filters": Filters(),
    }
    change = dict(change)
    replaced = type(params)(**(vars(params) | change.pop("params", {})))
    with pytest.raises(error, match=words):
        sample_triton.draw(params=replaced, **(arguments | change))
