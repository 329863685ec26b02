"""The engine model under arbitrary work: bounds, conservation, longest prefix, and complete events."""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway_simulator.model.blocks import block_keys
from spillway_simulator.model.engine import EngineShape, SimulatedEngine
from spillway_simulator.model.events import BlocksRemoved, BlocksStored, DeviceCleared, Medium
from spillway_simulator.model.presets import PRESETS
from spillway_simulator.model.request import EngineRequest
from spillway_simulator.model.tiers import SharedTier

BLOCK = 4
SHAPE = EngineShape(BLOCK, 12, 6, max_running=3, max_batched_tokens=10, max_model_tokens=40, announce_shared=True)
_instant = PRESETS["instant"]
RATES = replace(
    _instant,
    step_seconds=0.01,
    prefill_token_seconds=0.004,
    decode_context_token_seconds=0.0001,
    request_overhead_seconds=0.003,
    cpu=_instant.cpu._replace(load_tokens_per_second=900.0, store_tokens_per_second=500.0),
    shared=_instant.shared._replace(load_tokens_per_second=400.0, store_tokens_per_second=300.0),
)

# Prompts over two letters share prefixes of every length.
work = st.lists(
    st.tuples(
        st.integers(0, 1),  # engine
        st.floats(0, 0.3),  # pause before it
        st.lists(st.sampled_from([1, 2]), min_size=1, max_size=30).map(lambda rest: [7] * 6 + rest),
        st.integers(1, 4),  # answer tokens
        st.sampled_from([None, None, "salt"]),
        st.booleans(),  # cancelled before the next one comes
    ),
    max_size=25,
)


class Mirror:
    """The state of one engine that a listener derives from its events alone."""

    def __init__(self) -> None:
        self.held: dict[Medium, set[int]] = defaultdict(set)
        self.tokens: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def apply(self, events: list[object]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                assert not self.held[event.medium] & set(event.keys), "stored twice"
                self.held[event.medium] |= set(event.keys)
                if event.tokens is not None:
                    assert len(event.tokens) == BLOCK * len(event.keys)
                    assert block_keys(event.tokens, BLOCK, event.salt, event.parent) == list(event.keys)
            elif isinstance(event, BlocksRemoved):
                assert set(event.keys) <= self.held[event.medium], "removed what was not there"
                self.held[event.medium] -= set(event.keys)
            elif isinstance(event, DeviceCleared):
                self.held[Medium.DEVICE].clear()


def longest(keys: list[int], limit: int, *held: frozenset[int]) -> int:
    return next(
        (at for at, key in enumerate(keys[:limit]) if not any(key in tier for tier in held)), min(limit, len(keys))
    )


def check_bounds(engine: SimulatedEngine, shared: SharedTier) -> None:
    device = engine.device
    assert 0 <= device.used_blocks <= SHAPE.device_blocks
    assert len(device.keys()) <= SHAPE.device_blocks
    assert len(engine.tiers.cpu) <= SHAPE.cpu_blocks
    assert len(shared) <= shared.capacity
    assert engine.running_requests <= SHAPE.max_running


@settings(max_examples=settings.default.max_examples, deadline=None)
@given(work, st.booleans())
def test_bounds_conservation_prefixes_and_events_hold_under_any_work(steps, whole_decodes):
    shared = SharedTier(10)
    shape = replace(SHAPE, whole_decodes=whole_decodes)
    engines = [SimulatedEngine(str(at), shape, RATES, shared) for at in range(2)]
    mirrors = [Mirror(), Mirror()]
    asked: dict[str, EngineRequest] = {}
    gained: dict[str, int] = defaultdict(int)
    finished: dict[str, object] = {}
    cancelled: set[str] = set()
    now = 0.0

    def advance(until: float) -> None:
        while True:
            due = [engine for engine in engines if engine.next_time is not None and engine.next_time <= until]
            if not due:
                break
            engine = min(due, key=lambda item: item.next_time)
            for item in engine.advance(engine.next_time):
                assert item.request_id not in finished and item.request_id not in cancelled
                gained[item.request_id] += item.tokens
                if item.finished:
                    finished[item.request_id] = item
            check_bounds(engine, shared)
        for engine, mirror in zip(engines, mirrors, strict=True):
            mirror.apply(engine.take_events())
            assert mirror.held[Medium.DEVICE] == engine.device.keys()
            assert mirror.held[Medium.CPU] == engine.tiers.cpu.keys()
        assert mirrors[0].held[Medium.SHARED] | mirrors[1].held[Medium.SHARED] == shared.keys()

    for number, (position, pause, prompt, answer, salt, cancel) in enumerate(steps):
        now += pause
        advance(now)
        request = EngineRequest(str(number), array("I", prompt), array("I", range(50, 50 + answer)), salt)
        asked[request.id] = request
        engines[position].submit(request, now)
        if cancel and number % 3 == 0:
            now += pause
            advance(now)
            if engines[position].cancel(request.id, now):
                cancelled.add(request.id)
    advance(float("inf"))

    assert set(finished) | cancelled == set(asked) and not set(finished) & cancelled
    assert all(gained[name] == len(asked[name].answer) for name in finished)
    for engine in engines:
        counters = engine.counters
        hits = counters.device_hit_tokens + counters.cpu_hit_tokens + counters.shared_hit_tokens
        assert counters.prompt_tokens == hits + counters.computed_tokens
        assert engine.device.used_blocks == 0 and engine.waiting_requests == 0 and engine.running_requests == 0


@settings(max_examples=60, deadline=None)
@given(work)
def test_a_hit_is_the_longest_prefix_that_any_reachable_tier_holds(steps):
    """One request at a time on free engines, loads always cheaper than prefill: exactly what is held is found."""
    shared = SharedTier(10)
    fast = RATES.shared._replace(load_tokens_per_second=1e9)
    engines = [SimulatedEngine(str(at), SHAPE, replace(RATES, shared=fast), shared) for at in range(2)]
    now = 0.0
    for number, (position, _, prompt, answer, salt, _) in enumerate(steps):
        now += 1000.0
        for engine in engines:
            engine.advance(now)
        engine = engines[position]
        keys = block_keys(prompt, BLOCK, salt)
        limit = (len(prompt) - 1) // BLOCK
        on_device = longest(keys, limit, engine.device.keys())
        anywhere = on_device + longest(keys[on_device:], limit - on_device, engine.tiers.cpu.keys(), shared.keys())
        engine.submit(EngineRequest(str(number), array("I", prompt), array("I", range(answer)), salt), now)
        item = engine.advance(now + 999.0)[-1]
        assert item.finished
        assert item.cached.device == on_device * BLOCK
        assert item.cached.total == anywhere * BLOCK


@settings(max_examples=60, deadline=None)
@given(work)
def test_runs_of_decode_steps_end_when_single_ones_do(steps):
    """Virtual time may skip through answers; nothing but the number of reports may differ."""
    ends = []
    for whole_decodes in (True, False):
        engine = SimulatedEngine("e", replace(SHAPE, whole_decodes=whole_decodes), RATES, SharedTier(10))
        now, done = 0.0, []
        for number, (_, pause, prompt, answer, salt, _) in enumerate(steps):
            now += pause
            done += engine.advance(now)
            engine.submit(EngineRequest(str(number), array("I", prompt), array("I", range(answer)), salt), now)
        done += engine.advance(float("inf"))
        ends.append({item.request_id: (item.seconds, item.cached) for item in done if item.finished})
    skipped, single = ends
    # Sums of other terms round otherwise.
    assert skipped == {name: (pytest.approx(seconds), cached) for name, (seconds, cached) in single.items()}
