from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.tiers.disk.slab.policy import (
    FREE,
    LIVE,
    MAIN,
    SMALL,
    WRITING,
    QueueArrays,
    S3Fifo,
    ghost_of,
    recently_evicted,
    tenant_victim,
)

SLOTS = 24


def make_arrays() -> QueueArrays:
    return QueueArrays.zeros(SLOTS)


def make_policy(arrays: QueueArrays) -> S3Fifo:
    def put(name: str, position: int, value: int) -> None:
        getattr(arrays, name)[position] = value

    return S3Fifo(arrays, put)


class NaiveS3Fifo:
    """The published algorithm with two real queues."""

    def __init__(self) -> None:
        self.small: deque[int] = deque()
        self.main: deque[int] = deque()
        self.hits: dict[int, int] = {}

    def enter(self, slot: int, queue: int) -> None:
        (self.small if queue == SMALL else self.main).append(slot)
        self.hits[slot] = 0

    def hit(self, slot: int) -> None:
        self.hits[slot] = min(3, self.hits[slot] + 1)

    def remove(self, slot: int) -> None:
        (self.small if slot in self.small else self.main).remove(slot)
        del self.hits[slot]

    def victim(self) -> int | None:
        while self.hits:
            if len(self.small) * 10 > len(self.hits) or not self.main:
                slot = self.small.popleft()
                if not self.hits[slot]:
                    self.small.appendleft(slot)
                    return slot
                self.hits[slot] = 0
            else:
                slot = self.main.popleft()
                if not self.hits[slot]:
                    self.main.appendleft(slot)
                    return slot
                self.hits[slot] -= 1
            self.main.append(slot)
        return None


actions = st.lists(
    st.tuples(st.sampled_from(["enter", "return", "hit", "hit", "remove", "evict"]), st.integers(0, SLOTS - 1)),
    max_size=200,
)


@given(actions=actions, others=st.booleans())
def test_the_arrays_evict_as_two_real_queues_would(actions: list[tuple[str, int]], others: bool) -> None:
    arrays = make_arrays()
    policy, other_process = make_policy(arrays), make_policy(arrays)
    naive = NaiveS3Fifo()
    for number, (action, slot) in enumerate(actions):
        # Two processes take turns: what one remembers about the order must not mislead it.
        now = other_process if others and number % 3 == 0 else policy
        if action in ("enter", "return") and arrays.state[slot] == FREE:
            queue = SMALL if action == "enter" else MAIN
            now.enter(slot, queue)
            naive.enter(slot, queue)
            arrays.state[slot] = LIVE
        elif action == "hit" and arrays.state[slot] == LIVE:
            arrays.frequency[slot] = min(3, arrays.frequency[slot] + 1)
            naive.hit(slot)
        elif action == "remove" and arrays.state[slot] == LIVE:
            arrays.state[slot] = FREE
            now.remove(slot)
            naive.remove(slot)
        elif action == "evict":
            victim = now.victim(int(np.count_nonzero(arrays.state)))
            assert victim == naive.victim()
            if victim is not None:
                arrays.state[victim] = FREE
                now.remove(victim)
                naive.remove(victim)
        assert arrays.small_used[0] == len(naive.small)


def test_an_entry_being_written_is_never_the_victim() -> None:
    arrays = make_arrays()
    policy = make_policy(arrays)
    for slot in range(4):
        policy.enter(slot, SMALL if slot < 2 else MAIN)
        arrays.state[slot] = WRITING
    assert policy.victim(4) is None
    arrays.state[3] = LIVE
    assert policy.victim(4) == 3


def test_a_tenant_gives_up_what_it_used_last_the_longest_ago() -> None:
    arrays = make_arrays()
    policy = make_policy(arrays)
    tenants = np.array([7, 7, 7, 8] + [0] * (SLOTS - 4), np.uint64)
    for slot in range(4):
        policy.enter(slot, SMALL)
        arrays.state[slot] = LIVE
    arrays.frequency[1] = 3  # hits of long ago count for nothing
    used_s = np.array([60, 50, 50, 10] + [0] * (SLOTS - 4), np.uint32)
    assert tenant_victim(arrays, tenants, used_s, 7) == 1
    used_s[1] = 70
    assert tenant_victim(arrays, tenants, used_s, 7) == 2
    assert tenant_victim(arrays, tenants, used_s, 8) == 3
    assert tenant_victim(arrays, tenants, used_s, 9) is None


@given(fingerprint=st.integers(1, 2**64 - 1), eviction=st.integers(0, 2**40), later=st.integers(1, 2**31 - 1))
def test_an_eviction_stays_in_the_ghost_queue_for_a_while(fingerprint: int, eviction: int, later: int) -> None:
    ghosts = np.zeros(16, np.uint64)
    ghosts[fingerprint % 16] = ghost_of(fingerprint, eviction)
    if ghosts[fingerprint % 16]:
        assert recently_evicted(ghosts, fingerprint, eviction + later, later)
        assert not recently_evicted(ghosts, fingerprint, eviction + later, later - 1)
        assert not recently_evicted(ghosts, fingerprint ^ 1 << 40, eviction + later, later)
