"""Two hundred streams while everything around them fails; `make test-chaos` shows the same with more requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from chaos.run import run


@pytest.mark.timeout(1800)  # a machine with other work is slow, and each wait has its own deadline
def test_no_request_is_lost_while_engines_and_a_replica_fail(tmp_path: Path) -> None:
    outcome = asyncio.run(run(tmp_path, streams=200, requests_per_step=40))
    print(outcome)

    assert outcome.faults == [], str(outcome)
    counts = outcome.counts
    met = (counts.first_asks, counts.own_hits, counts.moved, counts.resent, counts.broken)
    assert all(met), f"a fault met no request: {outcome}"
