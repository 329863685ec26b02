from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.config import EngineConfig, ModelConfig, RoutingConfig
from spillway_gateway.errors import NoEngineReady
from spillway_gateway.fleet.engines import EngineState, Lease, ModelFleet, PromptBlocks
from spillway_gateway.fleet.prefix_index import PrefixIndex


def fleet_of(names: list[str]) -> ModelFleet:
    index = PrefixIndex("m", bytes_max=10_000_000, orphans_max=10, default_block_tokens=4, clock=lambda: 0.0)
    engines = tuple(EngineConfig(name, "http://127.0.0.1:1") for name in names)
    fleet = ModelFleet(ModelConfig("m", engines), RoutingConfig(), index, clock=lambda: 0.0)
    for engine in fleet.engines.values():
        engine.set_state(EngineState.READY, "ready")
    return fleet


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 500)), max_size=80))
def test_counters_are_exact_and_never_negative(steps: list[tuple[int, int, int]]) -> None:
    fleet = fleet_of(["a", "b", "c"])
    open_leases: list[Lease] = []
    for action, at, tokens in steps:
        if action <= 1 or not open_leases:
            open_leases.append(fleet.choose(PromptBlocks([], 4, tokens, tokens), frozenset()))
        elif action == 2:
            open_leases[at % len(open_leases)].first_byte(1.0, measures_prefill=False)
        else:
            lease = open_leases.pop(at % len(open_leases))
            lease.close()
            lease.close()
            lease.first_byte(1.0, measures_prefill=False)
        assert sum(engine.running_requests for engine in fleet.engines.values()) == len(open_leases)
        assert all(engine.running_requests >= 0 and engine.queued_tokens >= 0 for engine in fleet.engines.values())
    for lease in open_leases:
        lease.close()
    assert all((engine.running_requests, engine.queued_tokens) == (0, 0) for engine in fleet.engines.values())


def test_the_next_request_sees_the_one_before() -> None:
    """Equal prompts sent together wait for one computation instead of being computed twice."""
    fleet = fleet_of(["a", "b"])
    prompt = PromptBlocks(range(250), 4, 1000, 1)

    first = fleet.choose(prompt, frozenset())
    again = fleet.choose(prompt, frozenset())

    assert first.engine is again.engine
    assert (again.decision.held.device_tokens, again.decision.uncached_tokens) == (1000, 1)


def test_a_plain_request_leaves_the_queue_when_its_prefill_should_be_over() -> None:
    fleet = fleet_of(["a"])
    lease = fleet.choose(PromptBlocks([], 4, 5000, 1), frozenset())
    assert lease.expected_prefill_seconds == 1.0

    lease.prefill_assumed()
    lease.close()

    assert (fleet.engines["a"].queued_tokens, fleet.engines["a"].running_requests) == (0, 0)


def test_rates_follow_what_is_measured() -> None:
    fleet = fleet_of(["a"])
    for _ in range(40):
        lease = fleet.choose(PromptBlocks([], 4, 1000, 1), frozenset())
        lease.first_byte(2.0, measures_prefill=True)
        lease.close()

    assert fleet.engines["a"].rates.prefill_tokens_per_second == pytest.approx(500, rel=0.01)


def test_nobody_ready_is_said_with_names() -> None:
    fleet = fleet_of(["a", "b"])
    fleet.engines["a"].set_state(EngineState.DOWN, "cannot connect (Connection refused)")

    with pytest.raises(NoEngineReady, match=r"a: cannot connect .*; b: failed for this request"):
        fleet.choose(PromptBlocks([], 4, 1, 1), frozenset({"b"}))
