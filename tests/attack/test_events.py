"""An engine's event stream against its gateway: events that follow nothing known, and batches that are none."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

import httpx
import pytest
from attack.target import MIB, Target
from stack_driver.deadlines import eventually

from spillway_gateway.testing.kv_publisher import KvPublisher

INDEX_MIB = 32
ORPHANS = 4_000
BATCH_EVENTS = 250
TOKENS = 1_024
BLOCK = 16
SECONDS_MAX = 240.0  # a machine without AVX-512 that runs other tests takes more than a minute


@pytest.fixture(scope="module")
def publisher() -> Iterator[KvPublisher]:
    made = KvPublisher(buffer_steps=100)
    yield made
    made.close()


@pytest.fixture(scope="module")
def target_settings(publisher: KvPublisher) -> dict[str, object]:
    return {
        "settings": {"index": {"bytesMax": INDEX_MIB * MIB, "orphansMax": 1_000_000}},
        "engine": {"kvEvents": publisher.events_url, "kvReplay": publisher.replay_url},
    }


def series(target: Target, name: str) -> float:
    page = httpx.get(target.ops_url + "/metrics", timeout=SECONDS_MAX).text
    return sum(float(value) for value in re.findall(rf'^{name}{{[^}}]*engine="fake-0"[^}}]*}} (\S+)$', page, re.M))


def test_events_that_follow_nothing_known_stay_within_the_index(target: Target, publisher: KvPublisher) -> None:
    eventually("events are followed", lambda: series(target, "spillway_gateway_event_replays_total"), SECONDS_MAX)

    def attack() -> None:
        done = series(target, "spillway_gateway_event_batches_total") + ORPHANS
        for number in range(ORPHANS):
            tokens = [(number * TOKENS + at) * 2_654_435_761 % (1 << 31) for at in range(TOKENS)]
            hashes = [(number << 32) + at for at in range(TOKENS // BLOCK)]
            publisher.stored(hashes, (1 << 60) + number, tokens, BLOCK)
        eventually(
            "all are taken in", lambda: series(target, "spillway_gateway_event_batches_total") >= done, SECONDS_MAX
        )

    target.suffer(attack).assert_bearable(grown_mib_max=2 * INDEX_MIB)


def test_one_batch_of_many_events_is_taken_in_over_many_iterations(target: Target, publisher: KvPublisher) -> None:
    numbers = itertools.count(ORPHANS)

    def attack() -> None:
        done = series(target, "spillway_gateway_event_batches_total") + 1
        events = []
        for _ in range(BATCH_EVENTS):
            first = next(numbers) * TOKENS
            tokens = [(first + at) * 2_654_435_761 % (1 << 31) for at in range(TOKENS)]
            hashes = [(1 << 60) + first + at for at in range(TOKENS // BLOCK)]
            events.append(["BlockStored", hashes, None, tokens, BLOCK, None, "GPU", None, None, None, None, None])
        publisher.publish(events)
        eventually(
            "it is taken in", lambda: series(target, "spillway_gateway_event_batches_total") >= done, SECONDS_MAX
        )

    target.suffer(attack).assert_bearable(grown_mib_max=2 * INDEX_MIB)


def removed() -> list[object]:
    return [["BlockRemoved", list(range(1 << 40, (1 << 40) + 1_000_000)), "GPU", None]]


def stored() -> list[object]:
    hashes = list(range(1 << 41, (1 << 41) + 300_000))
    return [["BlockStored", hashes, None, [7] * (300_000 * BLOCK), BLOCK, None, "GPU", None, None, None, None, None]]


def cleared() -> list[object]:
    return [["AllBlocksCleared"]] * 20_000


@pytest.mark.parametrize("events", [removed, stored, cleared])
def test_a_batch_that_takes_long_is_taken_in_over_many_iterations(
    target: Target, publisher: KvPublisher, events: Callable[[], list[object]]
) -> None:
    given = events()

    def attack() -> None:
        done = series(target, "spillway_gateway_event_batches_total") + 1
        publisher.publish(given)
        eventually(
            "it is taken in", lambda: series(target, "spillway_gateway_event_batches_total") >= done, SECONDS_MAX
        )

    target.suffer(attack).assert_bearable(grown_mib_max=300)


def test_batches_that_are_none_do_not_keep_it_busy(target: Target, publisher: KvPublisher) -> None:
    replays = series(target, "spillway_gateway_event_replays_total")
    for number in range(20):
        publisher.publish_payload(b"\xc1 no batch")
        publisher.stored([number], None, list(range(BLOCK)), BLOCK)
    eventually(
        "all are counted", lambda: series(target, "spillway_gateway_events_undecodable_total") >= 20, SECONDS_MAX
    )
    before = series(target, "spillway_gateway_event_batches_total")
    publisher.stored([21], None, list(range(BLOCK)), BLOCK)
    eventually(
        "the next is taken in", lambda: series(target, "spillway_gateway_event_batches_total") > before, SECONDS_MAX
    )

    assert series(target, "spillway_gateway_events_undecodable_total") == 20
    assert series(target, "spillway_gateway_event_replays_total") == replays
