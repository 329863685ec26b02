from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan.idle_chunks import IdleChunk, IdleChunks

TENANT, OTHER = b"tenant-1", b"tenant-2"
KEYS = st.lists(st.sampled_from([b"1", b"2", b"3", b"4"]))


def of(*keys: bytes, tenant: bytes = TENANT) -> list[IdleChunk]:
    return [IdleChunk(key, tenant) for key in keys]


def test_what_was_used_longest_ago_comes_first_and_each_prefix_from_its_head() -> None:
    idle = IdleChunks(10)
    idle.add([b"a1", b"a2"], TENANT, 0.0)
    idle.add([b"b1", b"b2"], OTHER, 1.0)
    idle.use([b"a1", b"a2", b"unknown"], 2.0)

    assert idle.take(0.9, 10) == []
    assert idle.take(1.0, 10) == of(b"b1", b"b2", tenant=OTHER)
    assert idle.take(5.0, 1) == of(b"a1")
    assert idle.take(5.0, 9) == of(b"a2") and not len(idle)


def test_beyond_its_room_the_oldest_are_forgotten_and_counted() -> None:
    idle = IdleChunks(2)
    idle.add([b"1", b"2", b"3"], TENANT, 0.0)

    assert idle.take(0.0, 9) == of(b"2", b"3") and idle.forgotten == 1


def test_what_has_left_the_tier_is_not_taken() -> None:
    idle = IdleChunks(10)
    idle.add([b"1", b"2"], TENANT, 0.0)
    idle.remove(b"1")
    idle.remove(b"unknown")
    assert idle.take(0.0, 1) == of(b"2")

    idle.add([b"3"], TENANT, 0.0)
    idle.clear()
    assert idle.take(0.0, 9) == [] and idle.forgotten == 0


@given(st.lists(st.tuples(st.booleans(), KEYS), max_size=20))
def test_every_chunk_is_taken_once_in_the_order_of_its_last_use(steps: list[tuple[bool, list[bytes]]]) -> None:
    idle = IdleChunks(100)
    used: dict[bytes, int] = {}
    for now, (is_new, keys) in enumerate(steps):
        if is_new:
            idle.add(keys, TENANT, now)
        else:
            idle.use(keys, now)
        for key in keys:
            if is_new or key in used:
                used.pop(key, None)
                used[key] = now

    assert [chunk.key for chunk in idle.take(100.0, 100)] == list(used)
    assert idle.take(100.0, 100) == []
