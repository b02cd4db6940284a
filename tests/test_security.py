"""What a client can make the worker keep: nothing that grows with what it sends.

Every id, rollout key and salt is another one, as from a client that floods a server.
"""

import gc
import tracemalloc

import pytest

from tests.test_rows import make_batch, make_request
from vllm_gumbel import SamplerSettings
from vllm_gumbel.integration import rows
from vllm_gumbel.integration.rows import SeedSource
from vllm_gumbel.rollout.state import Rollout


def flood(batch, requests, name):
    """Let requests come, be drawn once and go, each with keys of its own."""
    for i in requests:
        extra = {"gumbel_rollout_key": f"user {i:050}", "gumbel_salt": i, "gumbel_return_info": 1}
        batch.add_request(make_request(name(i), extra_args=extra))
        batch.refresh_metadata()
        batch.sampling_metadata.rows.take_admitted()
        batch.remove_request(name(i))
        batch.condense()


@pytest.mark.parametrize("name", [lambda i: f"cmpl-{i}", lambda i: f"cmpl-{i}-{'x' * 10_000}"], ids=["short", "long"])
def test_requests_that_are_gone_leave_nothing_behind(name, monkeypatch):
    """3,000 more of them leave less than 20 KiB more; what one of them is called is 10 to 10,000 bytes."""
    monkeypatch.setattr(rows, "MOST_TOLD", 100)
    batch = make_batch(seeds=SeedSource(0, 0), rollout=Rollout(SamplerSettings(rollout_fraction=0.5)))
    flood(batch, range(500), name)
    tracemalloc.start()
    try:
        flood(batch, range(500, 1000), name)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        flood(batch, range(1000, 4000), name)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 20 * 1024
    assert len(batch.told) == (100 if len(name(0)) < 256 else 0)
    assert not batch._request_rows
    assert not batch.admitted
