"""Events over real sockets: from the start, after a gap, after a restart, in both shapes and framings."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import aiohttp
import pytest
import zmq.asyncio

from spillway_gateway.config.settings import EngineConfig, RoutingConfig
from spillway_gateway.fleet import kv_events, kv_replay
from spillway_gateway.fleet.block_holders import STEP_BLOCKS
from spillway_gateway.fleet.engine import Engine, EngineState
from spillway_gateway.fleet.event_decoder import BlockRemoved, Tier
from spillway_gateway.fleet.kv_events import EventFollower, in_turns
from spillway_gateway.fleet.kv_replay import ReplayFailed
from spillway_gateway.fleet.prefix_index import SWEEP_STEPS_PER_ITERATION, PrefixIndex
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.routing.fleet_view import NOTHING_HELD
from spillway_gateway.routing.prefix import namespace_key, token_block_keys
from spillway_gateway.testing.kv_publisher import KvPublisher
from spillway_gateway.testing.running import gateway_config, running_gateway, until

BLOCK = 4
PROMPT = list(range(16))
STORE = "redis/00000000000000aa"


class Followed:
    """An index that follows one publisher."""

    def __init__(self, publisher: KvPublisher) -> None:
        self.index = PrefixIndex(
            "m", bytes_max=10_000_000, orphans_max=100, default_block_tokens=BLOCK, clock=lambda: 0.0
        )
        config = EngineConfig("e", "http://127.0.0.1:9", publisher.events_url, publisher.replay_url)
        self.engine = Engine("m", config, RoutingConfig())
        self.index.add_engine("e")
        self.metrics = GatewayMetrics()

    def held_tokens(self) -> int:
        keys = token_block_keys(namespace_key("m"), PROMPT, BLOCK)
        found = self.index.match(keys, BLOCK)
        return found["e"].total_tokens if "e" in found else 0

    def count(self, metric: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(metric, {"engine": "e", **labels}) or 0.0


@asynccontextmanager
async def followed(publisher: KvPublisher) -> AsyncIterator[Followed]:
    context = zmq.asyncio.Context()
    made = Followed(publisher)
    follower = EventFollower(made.engine, made.index, made.metrics, context)
    task = asyncio.create_task(follower.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)


def store(publisher: KvPublisher, block: int, *, lose: bool = False) -> None:
    parent = block - 1 if block else None
    publisher.stored([block], parent, PROMPT[block * BLOCK : (block + 1) * BLOCK], BLOCK, lose=lose)


@pytest.fixture(params=[("array", False), ("map", True)], ids=["0.23", "newer"])
def publisher(request: pytest.FixtureRequest) -> Any:
    shape: Literal["array", "map"]
    shape, replay_topic = request.param
    made = KvPublisher(shape=shape, replay_topic=replay_topic)
    yield made
    made.close()


async def test_what_was_published_before_is_replayed_and_what_follows_is_live(publisher: KvPublisher) -> None:
    store(publisher, 0)
    store(publisher, 1)
    async with followed(publisher) as view:
        await until(lambda: view.held_tokens() == 8)
        store(publisher, 2)
        await until(lambda: view.held_tokens() == 12)
        publisher.removed([2])
        await until(lambda: view.held_tokens() == 8)
        assert view.engine.events_live


async def test_a_second_replay_changes_no_store_but_says_who_loads_from_it(publisher: KvPublisher) -> None:
    """Another engine may have announced something else about the same blocks meanwhile."""
    for block in range(2):
        store(publisher, block)
    publisher.stored([0, 1], None, [], 0, medium=STORE)
    publisher.removed([0, 1])
    async with followed(publisher) as view:
        await until(lambda: view.count("spillway_gateway_event_replays_total", outcome="completed"))
        assert view.held_tokens() == 8
        view.index.add_engine("other")
        view.index.apply("other", BlockRemoved([1], Tier.SHARED, 0, store=STORE))
        assert view.held_tokens() == 4
        view.engine.set_state(EngineState.DOWN, "hung")
        await until(lambda: view.held_tokens() == 0)
        view.engine.set_state(EngineState.READY, "ready")
        await until(lambda: view.count("spillway_gateway_event_replays_total", outcome="completed") == 2)
        assert view.held_tokens() == 4


async def test_an_engine_that_becomes_ready_after_its_replay_is_not_replayed_again(publisher: KvPublisher) -> None:
    """The second replay would replace the live events that follow, and for an instant less would be known than was."""
    async with followed(publisher) as view:
        await until(lambda: view.count("spillway_gateway_event_replays_total", outcome="completed"))
        view.engine.set_state(EngineState.READY, "ready")
        store(publisher, 0)
        await until(lambda: view.held_tokens() == 4)
        await asyncio.sleep(0.1)  # as long as a replay from loopback takes, and more
        assert view.count("spillway_gateway_event_replays_total", outcome="completed") == 1


async def test_a_gap_is_replayed(publisher: KvPublisher) -> None:
    store(publisher, 0)
    async with followed(publisher) as view:
        await until(lambda: view.held_tokens() == 4)
        store(publisher, 1, lose=True)
        store(publisher, 2, lose=True)
        store(publisher, 3)
        await until(lambda: view.held_tokens() == 16)

    assert view.count("spillway_gateway_event_gaps_total") == 1


async def test_a_restarted_engine_loses_its_old_blocks(publisher: KvPublisher) -> None:
    for block in range(3):
        store(publisher, block)
    async with followed(publisher) as view:
        await until(lambda: view.held_tokens() == 12)
        events, replay = publisher.events_url, publisher.replay_url
        publisher.close()
        reborn = KvPublisher(events, replay)
        try:
            store(reborn, 0)
            await until(lambda: view.held_tokens() == 4)
            store(reborn, 1)
            await until(lambda: view.held_tokens() == 8)
        finally:
            reborn.close()


async def test_a_message_that_is_too_long_ends_a_connection_and_not_the_following(
    publisher: KvPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MESSAGE_BYTES_MAX", 4096)
    monkeypatch.setattr(kv_events, "RECONNECT_SECONDS", 0.05)
    store(publisher, 0)
    async with followed(publisher) as view:
        for blocks in (2, 3):
            await until(lambda count=blocks - 1: view.held_tokens() == count * BLOCK and view.engine.events_live)
            publisher.publish_payload(b"x" * 5000)
            await until(lambda: not view.engine.events_live)
            store(publisher, blocks - 1)  # without a subscriber: it comes with the replay
            await until(lambda count=blocks: view.held_tokens() == count * BLOCK)


async def test_a_sequence_that_begins_anew_on_the_same_connection_is_a_restart(publisher: KvPublisher) -> None:
    for block in range(3):
        store(publisher, block)
    async with followed(publisher) as view:
        await until(lambda: view.held_tokens() == 12)
        publisher._batches.clear()
        publisher._sequence = 0
        store(publisher, 0)
        await until(lambda: view.held_tokens() == 4)

    assert view.count("spillway_gateway_event_restarts_total") == 1


async def test_repeats_are_harmless(publisher: KvPublisher) -> None:
    async with followed(publisher) as view:
        for _ in range(3):
            for block in range(4):
                store(publisher, block)
        await until(lambda: view.held_tokens() == 16)


async def test_an_engine_that_is_down_holds_nothing_until_it_is_back(publisher: KvPublisher) -> None:
    store(publisher, 0)
    async with followed(publisher) as view:
        await until(lambda: view.held_tokens() == 4)
        view.engine.set_state(EngineState.DOWN, "no answer")
        await until(lambda: view.held_tokens() == 0)
        view.engine.set_state(EngineState.READY, "ready")
        await until(lambda: view.held_tokens() == 4)


async def test_what_cannot_be_decoded_is_counted_and_the_rest_goes_on(publisher: KvPublisher) -> None:
    async with followed(publisher) as view:
        await until(lambda: view.count("spillway_gateway_event_replays_total", outcome="completed"))
        publisher.publish([["NewKind", 1], 7])
        store(publisher, 0)
        await until(lambda: view.held_tokens() == 4)

    assert view.count("spillway_gateway_events_undecodable_total") == 2


NO_BATCH = b"\xc1 no batch"


async def test_an_undecodable_batch_within_a_replay_is_skipped_once(
    publisher: KvPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    store(publisher, 0)
    publisher.publish_payload(NO_BATCH)
    store(publisher, 1)
    publisher.publish_payload(NO_BATCH)
    store(publisher, 2)
    async with followed(publisher) as view:
        await until(lambda: view.count("spillway_gateway_event_replays_total", outcome="completed"))
        assert view.held_tokens() == 12
        publisher.publish_payload(NO_BATCH)
        store(publisher, 3)
        await until(lambda: view.held_tokens() == 16)

    assert view.count("spillway_gateway_events_undecodable_total") == 3
    assert view.count("spillway_gateway_event_batches_total") == 4
    assert view.count("spillway_gateway_event_replays_total", outcome="completed") == 1
    assert (
        len([record for record in caplog.records if "skipped" in record.message and record.levelname == "WARNING"]) == 1
    )


async def test_an_undecodable_batch_within_a_gap_is_skipped_once(publisher: KvPublisher) -> None:
    store(publisher, 0)
    async with followed(publisher) as view:
        await until(lambda: view.count("spillway_gateway_event_replays_total", outcome="completed"))
        publisher.publish_payload(NO_BATCH, lose=True)
        store(publisher, 1, lose=True)
        store(publisher, 2)
        await until(lambda: view.held_tokens() == 12)
        await until(lambda: view.count("spillway_gateway_event_replays_total", outcome="completed") == 2)

    assert view.count("spillway_gateway_events_undecodable_total") == 1


async def test_a_replay_that_brings_nothing_new_is_not_requested_again_at_once(
    publisher: KvPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher answers with batches that were applied before, and never with its end marker."""
    monkeypatch.setattr(kv_replay, "REPLAY_PAUSE_SECONDS_MAX", 0.02)
    monkeypatch.setattr(kv_events, "REPLAY_BACKOFF_SECONDS", 600.0)
    store(publisher, 0)
    async with followed(publisher) as view:
        await until(lambda: view.count("spillway_gateway_event_replays_total", outcome="completed"))
        requested_from: list[int] = []
        first = publisher.batches(0)[:1]
        monkeypatch.setattr(publisher, "batches", lambda start: requested_from.append(start) or first)
        publisher.silent_replays = True
        store(publisher, 1, lose=True)
        store(publisher, 2)
        await until(lambda: view.count("spillway_gateway_event_replays_total", outcome="failed"))
        publisher.stored([77], None, [7, 7, 7, 7], BLOCK)
        await until(lambda: view.index.blocks == 1)  # blocks after the gap are held, blocks before it are not

        assert requested_from == [1]


async def test_a_replay_port_that_refuses_costs_no_entries(
    publisher: KvPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_replay, "REPLAY_MESSAGE_SECONDS_MAX", 0.02)
    monkeypatch.setattr(kv_events, "REPLAY_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(kv_events, "REPLAY_BACKOFF_SECONDS_MAX", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refusing = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    publisher.replay_url = refusing
    async with followed(publisher) as view:
        await until(lambda: view.engine.events_live)
        known = []
        for block in range(4):
            failures = view.count("spillway_gateway_event_replays_total", outcome="failed")
            async with asyncio.timeout(120):
                while view.held_tokens() < 4:  # the subscription may not stand yet
                    store(publisher, 0)
                    await asyncio.sleep(0.005)
            if block:
                store(publisher, block)
            await until(lambda at=block: view.held_tokens() == 4 * at + 4)
            await until(
                lambda before=failures: view.count("spillway_gateway_event_replays_total", outcome="failed") > before
            )
            known.append(view.held_tokens())

    assert known == [4, 8, 12, 16]


async def test_events_that_a_replay_was_too_early_for_are_kept(
    publisher: KvPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, release = threading.Event(), threading.Event()
    batches = publisher.batches

    def late(first: int) -> list[tuple[int, bytes]]:
        found = batches(first)
        taken.set()
        release.wait(120)
        return found

    monkeypatch.setattr(publisher, "batches", late)
    async with followed(publisher) as view:
        await until(taken.is_set)
        async with asyncio.timeout(120):
            while view.held_tokens() < 4:  # the subscription may not stand yet
                store(publisher, 0)
                await asyncio.sleep(0.005)
        for block in (1, 2):
            store(publisher, block)
        await until(lambda: view.held_tokens() == 12)
        release.set()
        await until(lambda: view.count("spillway_gateway_event_replays_total", outcome="completed") >= 2)

        assert view.held_tokens() == 12


async def test_the_pause_between_replays_that_fail_grows(
    publisher: KvPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = Followed(publisher)
    follower = EventFollower(view.engine, view.index, view.metrics, zmq.asyncio.Context.instance())
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda: 100.0)
    pauses = []
    for _ in range(8):
        follower._replay_failed(ReplayFailed("no answer"))
        assert follower._replay_due is not None
        pauses.append(follower._replay_due - 100.0)

    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60]


async def test_without_replay_a_gap_empties_the_view_of_that_engine() -> None:
    publisher = KvPublisher(replay=None)
    try:
        async with followed(publisher) as view:
            await until(lambda: view.engine.events_live)
            async with asyncio.timeout(120):
                while view.held_tokens() < 4:  # the subscription may not stand yet
                    publisher._sequence = 0
                    store(publisher, 0)
                    await asyncio.sleep(0.01)
            publisher.removed([0], lose=True)
            publisher.stored([50], None, [9, 9, 9, 9], BLOCK)
            await until(lambda: view.held_tokens() == 0)
    finally:
        publisher.close()


async def test_ten_thousand_batches_replay_completely(publisher: KvPublisher) -> None:
    for at in range(9_999):
        publisher.stored([1_000 + at], None, [at, at, at, at], BLOCK)
    store(publisher, 0)
    async with followed(publisher) as view:
        await until(lambda: view.count("spillway_gateway_event_batches_total") >= 10_000)

        assert view.held_tokens() == 4
        assert view.count("spillway_gateway_event_batches_total") == 10_000
        assert view.index.blocks == 10_000


async def test_a_backlog_of_small_batches_is_applied_over_many_event_loop_iterations(
    publisher: KvPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking the next message from a queue that is not empty does not return to the event loop by itself."""
    batches, now, iterations, context = 100, 0.0, 0, zmq.asyncio.Context()
    for at in range(batches):
        publisher.stored([1_000 + at], None, [at, at, at, at], BLOCK)
    view = Followed(publisher)
    follower = EventFollower(view.engine, view.index, view.metrics, context, clock=lambda: now)
    apply = view.index.apply_in_steps

    def slow_apply(*arguments: Any, **named: Any) -> Iterator[None]:
        nonlocal now
        now += kv_events.ITERATION_SECONDS_MAX * 0.4
        return apply(*arguments, **named)

    async def count_iterations() -> None:
        nonlocal iterations
        while view.index.blocks < batches:
            iterations += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(view.index, "apply_in_steps", slow_apply)
    for sequence, payload in publisher.batches(0):
        follower._queue.put_nowait([b"", sequence.to_bytes(8, "big"), payload])
    tasks = [asyncio.create_task(follower._consume()), asyncio.create_task(count_iterations())]
    await until(lambda: view.index.blocks == batches)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    context.destroy(linger=0)

    assert iterations >= batches // 3


def all_replayed(running: Any) -> bool:
    """Whether the first replay of every engine has been applied: it replaces what live events brought before, so for an
    instant less is known than was."""
    exposition = running.gateway.metrics.exposition().decode()
    names = running.gateway.fleets[0].engines
    return all(f'event_replays_total{{engine="{name}",outcome="completed"}}' in exposition for name in names)


async def test_requests_follow_the_events(start_engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    """End to end: the engine announces blocks, and the next request with that prefix goes there by token blocks. The
    log says so, step by step, and holds no token of the prompt."""
    caplog.set_level(logging.DEBUG, "spillway_gateway")
    publisher = KvPublisher()
    engines = [
        await start_engine(name=name, publisher=published, block_tokens=16)
        for name, published in (("a", KvPublisher()), ("b", publisher))
    ]
    config = gateway_config(engines, routing={"speculativeSeconds": 0.001, "defaultBlockTokens": 16})
    prompt = list(range(200))
    async with running_gateway(config) as running, aiohttp.ClientSession() as client:
        fleet = running.gateway.fleets[0]
        await until(lambda: all_replayed(running))
        engines[1].prefill(prompt)
        keys = token_block_keys(namespace_key("fake"), prompt, 16)
        # Each block is an event of its own: all twelve of them, not the first.
        await until(lambda: fleet.index.match(keys, 16).get("b", NOTHING_HELD).total_tokens == 192)
        body = json.dumps({"model": "fake", "prompt": [*prompt, 7]})
        async with client.post(running.url + "/v1/completions", data=body) as reply:
            usage = (await reply.json())["usage"]
            headers = reply.headers
        await until(lambda: "actual_cached_tokens_total{" in running.gateway.metrics.exposition().decode())
        metrics = running.gateway.metrics.exposition().decode()

        # Announced and not there: an engine that finds nothing leaves the number out, and it counts as 0.
        other = list(range(1_000, 1_200))
        publisher.stored([900 + block for block in range(12)], None, other[:192], 16)
        keys = token_block_keys(namespace_key("fake"), other, 16)
        await until(lambda: fleet.index.match(keys, 16).get("b", NOTHING_HELD).total_tokens == 192)
        async with client.post(
            running.url + "/v1/completions", data=json.dumps({"model": "fake", "prompt": other})
        ) as reply:
            assert (await reply.json())["usage"]["prompt_tokens_details"] is None
        in_vain = 'spillway_gateway_predicted_cached_tokens_total{model="fake",tier="device"} 384.0'
        await until(lambda: in_vain in running.gateway.metrics.exposition().decode())
        not_found = 'spillway_gateway_missing_cached_tokens_total{model="fake",tier="device"} 192.0'
        await until(lambda: not_found in running.gateway.metrics.exposition().decode())
        later = running.gateway.metrics.exposition().decode()

    assert (headers["x-spillway-engine"], headers["x-spillway-route"]) == ("b", "prefix")
    assert int(headers["x-spillway-prefix-tokens"]) == usage["prompt_tokens_details"]["cached_tokens"] == 192
    assert 'spillway_gateway_predicted_cached_tokens_total{model="fake",tier="device"} 192.0' in metrics
    assert 'spillway_gateway_actual_cached_tokens_total{model="fake"} 192.0' in metrics
    assert 'spillway_gateway_actual_cached_tokens_total{model="fake"} 192.0' in later
    assert 'spillway_gateway_missing_cached_tokens_total{model="fake",tier="device"} 0.0' in metrics

    lines = [record.getMessage() for record in caplog.records if record.name.startswith("spillway_gateway")]
    steps = (
        "engine b: its events are connected",
        "engine b: replayed up to batch",
        "engine b: batch 11 applied: 1 events",
        "201 prompt tokens in 12 blocks; salted: False",
        "is routed to engine b by prefix: of 201 tokens 192 are expected on its device",
        "status 200",
    )
    at = [next(at for at, line in enumerate(lines) if step in line) for step in steps]
    assert at == sorted(at)
    assert not any("198, 199" in line for line in lines), "tokens of a prompt"


async def test_requests_follow_the_events_of_their_adapter(start_engine: Any) -> None:
    """Both engines hold the same tokens, each computed with another adapter."""
    names = ["support", "sql"]
    engines = [
        await start_engine(name=name, publisher=KvPublisher(), block_tokens=16, adapters=names) for name in names
    ]
    config = gateway_config(engines, adapters=names, routing={"defaultBlockTokens": 16})
    prompt = list(range(200))
    async with running_gateway(config) as running, aiohttp.ClientSession() as client:
        fleet = running.gateway.fleets[0]
        await until(lambda: all_replayed(running))
        for engine in engines:
            hashes = [b"%s-%d" % (engine.name.encode(), block) for block in range(12)]
            engine.publisher.stored(hashes, None, prompt[:192], 16, lora_name=engine.name)
        for adapter in names:
            keys = token_block_keys(namespace_key("fake", adapter), prompt, 16)
            await until(lambda: fleet.index.match(keys, 16).get(adapter, NOTHING_HELD).total_tokens == 192)  # noqa: B023
        found = []
        for adapter in names * 2:
            body = json.dumps({"model": adapter, "prompt": [*prompt, 7]})
            async with client.post(running.url + "/v1/completions", data=body) as reply:
                assert reply.status == 200
                found.append((reply.headers["x-spillway-engine"], reply.headers["x-spillway-prefix-tokens"]))

    assert found == [("support", "192"), ("sql", "192")] * 2


@pytest.mark.parametrize("part", ["_read_live", "_read_monitor", "_consume"])
async def test_a_follower_whose_part_fails_ends_and_follows_again(
    publisher: KvPublisher, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The failure of one of its tasks is no silence: whoever supervises it runs it again."""
    view = Followed(publisher)
    context = zmq.asyncio.Context()
    follower = EventFollower(view.engine, view.index, view.metrics, context)

    async def fails(*_: Any) -> None:
        raise KeyError("defect")

    with monkeypatch.context() as patch:
        patch.setattr(follower, part, fails)
        with pytest.raises(ExceptionGroup):
            await follower.run()
    assert not view.engine.on_state

    publisher.stored([1], None, [1, 2, 3, 4], BLOCK)
    following = asyncio.create_task(follower.run())
    await until(lambda: view.index.blocks == 1)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    context.destroy(linger=0)


async def test_one_message_of_many_blocks_is_applied_over_many_event_loop_iterations(publisher: KvPublisher) -> None:
    """Counted, not timed: between two turns of another task the index grows by a bounded number of blocks."""
    count = 20_000
    view = Followed(publisher)
    context = zmq.asyncio.Context()
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 2 * kv_events.ITERATION_SECONDS_MAX
        return now

    follower = EventFollower(view.engine, view.index, view.metrics, context, clock=clock)
    publisher.stored(list(range(count)), None, [7] * count * BLOCK, BLOCK)
    ((sequence, payload),) = publisher.batches(0)
    seen = [0]

    async def watch() -> None:
        while view.index.blocks < count:
            seen.append(view.index.blocks)
            await asyncio.sleep(0)

    follower._queue.put_nowait([b"", sequence.to_bytes(8, "big"), payload])
    tasks = [asyncio.create_task(follower._consume()), asyncio.create_task(watch())]
    await until(lambda: view.index.blocks == count)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    context.destroy(linger=0)

    assert max(after - before for before, after in itertools.pairwise(seen)) <= STEP_BLOCKS


async def test_few_steps_over_the_index_are_taken_in_one_iteration() -> None:
    """One iteration takes few steps, however many engines leave at once."""
    index = PrefixIndex("m", bytes_max=10_000_000, orphans_max=100, default_block_tokens=BLOCK, clock=lambda: 0.0)
    taken = 0

    def steps() -> Iterator[None]:
        nonlocal taken
        for _ in range(3):
            taken += 1
            yield

    leaving = [asyncio.create_task(in_turns(index, steps())) for _ in range(50 * SWEEP_STEPS_PER_ITERATION)]
    before = 0
    while not all(task.done() for task in leaving):
        await asyncio.sleep(0)
        assert taken - before <= SWEEP_STEPS_PER_ITERATION
        before = taken
    assert taken == 3 * len(leaving)
