"""vLLM's own queues in the order of what each request would find; the device and the CPU tier only answer."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, PriorityRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from spillway_connector.engine.features.queue_order import (
    OrderedFCFSQueue,
    OrderedPriorityQueue,
    QueueOrder,
    ordering_queue,
)
from spillway_connector.engine.requests.state import RequestFields
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.vllm_parts import part_of
from spillway_settings.queue_order import CANDIDATES_MAX

BLOCK_TOKENS, BLOCKS, BOUND = 4, 8, 4.0
QUEUES = {"fcfs": OrderedFCFSQueue, "priority": OrderedPriorityQueue}


class Device:
    """Answers what its prefix cache holds, and has no other method: nothing could be marked as used."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.questions = 0

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> list[object] | None:
        assert groups == [0]
        self.questions += 1
        return [object()] if block_hash in self.held else None


class Rig:
    def __init__(self, policy: str = "fcfs") -> None:
        self.clock = SteppedClock()
        self.ready: set[bytes] = set()
        self.states: dict[str, Any] = {}
        self.device_blocks: Any = Device()
        self.chunk_tokens, self.blocks_per_chunk = BLOCK_TOKENS, 1
        self.manager: Any = SimpleNamespace(now=self.clock, primary_tier=SimpleNamespace(ready=self.ready))
        self.queue = QUEUES[policy](QueueOrder(self, BOUND))

    def known_state(self, request_id: str) -> RequestFields | None:
        return self.states.get(request_id)  # type: ignore[no-any-return]

    def request(self, name: str, priority: int = 0, blocks: int = BLOCKS) -> Request:
        made = Request(
            name,
            [1] * (blocks * BLOCK_TOKENS + 1),
            SamplingParams(),
            None,
            priority=priority,
            arrival_time=self.clock(),
        )
        made.block_hashes = hashes(name)[:blocks]
        keys: list[bytes] = []
        self.states[name] = SimpleNamespace(
            arrived_at=self.clock(),
            group_states=[SimpleNamespace(offload_keys=keys)],
            update_offload_keys=lambda: keys.extend(key + b"key" for key in made.block_hashes[len(keys) :]),
        )
        return made

    def arrive(self, name: str, **fields: int) -> Request:
        request = self.request(name, **fields)
        self.queue.add_request(request)
        return request

    def on_device(self, name: str, blocks: int) -> None:
        self.device_blocks.held.update(hashes(name)[:blocks])

    def in_tier(self, name: str, blocks: int) -> None:
        self.ready.update(key + b"key" for key in hashes(name)[:blocks])

    def pop(self) -> str:
        """Pop a request as vLLM admits one: it looks first, and takes the request that it has seen."""
        seen = self.queue.peek_request()
        assert self.queue.pop_request() is seen
        return str(seen.request_id)

    def pop_all(self) -> str:
        return "".join(self.pop() for _ in range(len(self.queue)))


def hashes(name: str) -> list[bytes]:
    return [f"{name}-{block}".encode() for block in range(BLOCKS)]


@pytest.fixture(params=QUEUES)
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.param)


def test_those_come_first_whose_prefix_is_on_the_device_or_in_the_cpu_tier(rig: Rig) -> None:
    for name in "abcd":
        rig.arrive(name)
    rig.on_device("b", 5)
    rig.in_tier("d", 8)
    rig.on_device("c", 2)
    rig.in_tier("c", 7)

    assert rig.pop_all() == "dcba"


def test_a_prefix_that_begins_on_the_device_and_goes_on_in_the_cpu_tier_is_one(rig: Rig) -> None:
    for name in "ab":
        rig.arrive(name)
    rig.in_tier("a", 5)
    rig.in_tier("b", 6)
    rig.ready.difference_update(key + b"key" for key in hashes("b")[:3])
    rig.on_device("b", 3)

    assert rig.pop_all() == "ba"


def test_a_request_that_reads_no_prefix_finds_none(rig: Rig) -> None:
    for name in "ab":
        rig.arrive(name).skip_reading_prefix_cache = name == "a"
        rig.on_device(name, 8 if name == "a" else 1)

    assert rig.pop_all() == "ba"


def test_nobody_is_overtaken_for_longer_than_the_bound(rig: Rig) -> None:
    rig.arrive("a")
    rig.clock.advance(BOUND - 0.5)
    rig.arrive("b")
    rig.on_device("b", 8)
    assert rig.queue.peek_request().request_id == "b"  # looked at, and not admitted: no room
    rig.clock.advance(0.5)
    rig.arrive("c")
    rig.on_device("c", 8)

    assert rig.pop_all() == "abc"


def test_a_request_that_a_step_preempted_goes_first(rig: Rig) -> None:
    rig.arrive("a")
    rig.on_device("a", 8)
    preempted = rig.request("b")
    preempted.status = RequestStatus.PREEMPTED
    rig.queue.prepend_request(preempted)

    assert rig.pop_all() == "ba"


def test_what_was_seen_is_what_is_taken_although_the_order_has_changed_since(rig: Rig) -> None:
    rig.arrive("a")
    rig.arrive("b")
    rig.on_device("a", 1)
    assert rig.queue.peek_request().request_id == "a"
    rig.on_device("b", 8)
    rig.clock.advance(60.0)

    assert rig.queue.pop_request().request_id == "a"
    assert rig.pop_all() == "b"


def test_what_became_of_a_prefix_since_counts_at_the_next_look(rig: Rig) -> None:
    rig.arrive("a")
    rig.arrive("b")
    rig.on_device("b", 8)
    assert rig.queue.peek_request().request_id == "b"
    rig.device_blocks.held.clear()
    rig.on_device("a", 3)
    rig.clock.advance(1.0)

    assert rig.queue.peek_request().request_id == "a"


def test_a_longer_queue_is_asked_about_no_more_than_a_short_one(rig: Rig) -> None:
    for number in range(1_000):
        rig.arrive(f"r{number:04}")
    for _ in range(50):
        rig.queue.peek_request()
        rig.arrive(f"s{len(rig.states):04}")

    assert 0 < rig.device_blocks.questions <= CANDIDATES_MAX * math.ceil(math.log2(BLOCKS) + 1)

    rig.clock.advance(BOUND)
    rig.device_blocks.questions = 0
    assert rig.pop() == "r0000"
    assert not rig.device_blocks.questions, "no request could be overtaken, and yet it was asked what they find"


def test_priorities_come_before_any_prefix() -> None:
    rig = Rig("priority")
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", 0)):
        rig.arrive(name, priority=priority)
    rig.on_device("c", 8)
    rig.on_device("d", 8)

    assert rig.pop_all() == "dbca"


def test_nothing_is_remembered_of_requests_that_have_left(rig: Rig) -> None:
    requests = [rig.arrive(name) for name in "abcd"]
    rig.queue.peek_request()
    rig.queue.remove_request(requests[0])
    rig.queue.peek_request()
    rig.queue.remove_requests([requests[1], requests[2]])
    rig.pop()

    assert not rig.queue and not rig.queue.order._found and not rig.queue.order._planned


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(QUEUES)), st.integers(0, 10**6), st.integers(20, 150))
def test_every_request_leaves_once_and_by_the_rules_whatever_happens(policy: str, seed: int, actions: int) -> None:
    rng, rig = random.Random(seed), Rig(policy)
    waiting: dict[str, Request] = {}
    for number in range(actions):
        action, name = rng.random(), f"{number:03}"
        if action < 0.4:
            waiting[name] = rig.arrive(name, priority=rng.randrange(2), blocks=rng.randint(1, BLOCKS))
            rig.on_device(name, rng.randint(0, BLOCKS))
            rig.in_tier(name, rng.randint(0, BLOCKS))
        elif action < 0.5:
            rig.clock.advance(rng.choice([0.01, 1.0, BOUND]))
        elif action < 0.6:
            rig.device_blocks.held -= {one for one in rig.device_blocks.held if rng.random() < 0.3}
        elif waiting and action < 0.7:
            gone = rng.sample(sorted(waiting), rng.randint(1, min(3, len(waiting))))
            rig.queue.remove_requests({waiting.pop(one) for one in gone})
        elif waiting and action < 0.75:
            rig.queue.peek_request()
        elif waiting:
            popped = waiting.pop(rig.pop())
            now, arrived = rig.clock(), rig.states[popped.request_id].arrived_at
            for other in waiting.values():
                since = rig.states[other.request_id].arrived_at
                if policy == "priority" and other.priority != popped.priority:
                    assert popped.priority < other.priority
                elif popped.status is not RequestStatus.PREEMPTED:
                    assert other.status is not RequestStatus.PREEMPTED
                    assert now - since < BOUND or arrived <= since
            if rng.random() < 0.2:  # it runs, and is preempted
                popped.status = RequestStatus.PREEMPTED
                rig.queue.prepend_request(popped)
                waiting[popped.request_id] = popped
        assert len(rig.queue) == len(waiting) and set(rig.queue) == set(waiting.values())
    left = {rig.pop() for _ in range(len(rig.queue))}
    assert left == set(waiting)


@pytest.mark.parametrize("queue", [FCFSRequestQueue, PriorityRequestQueue])
def test_a_scheduler_without_such_an_order_keeps_its_queue(queue: type[Any]) -> None:
    enqueue = ordering_queue(Scheduler._enqueue_waiting_request)
    scheduler = part_of(Scheduler, waiting=queue(), connector=object())
    enqueue(scheduler, Rig().request("a"))

    assert type(scheduler.waiting) is queue and len(scheduler.waiting) == 1
