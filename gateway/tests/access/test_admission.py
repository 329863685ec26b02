from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.access.admission import (
    ADMITTING_SECONDS_MAX,
    CANDIDATES_MAX,
    REFUSALS_PER_ITERATION,
    Admission,
)
from spillway_gateway.access.keys import Priority
from spillway_gateway.config.settings import AdmissionConfig
from spillway_gateway.errors import GatewayOverloaded, NoEngineReady
from spillway_settings.queue_order import OVERTAKE_SECONDS


async def queued(admission: Admission, tenant: str, order: list[str], priority: Priority = Priority.NORMAL) -> Any:
    async def go() -> None:
        await admission.enter(tenant, priority)
        order.append(tenant)

    task = asyncio.create_task(go())
    await asyncio.sleep(0)
    return task


async def test_tenants_take_turns_and_priorities_go_first() -> None:
    admission = Admission(AdmissionConfig(), lambda: 1)
    await admission.enter("first", Priority.NORMAL)
    order: list[str] = []
    tasks = [await queued(admission, "many", order) for _ in range(3)]
    tasks += [await queued(admission, "few", order), await queued(admission, "late", order, Priority.LOW)]
    tasks.append(await queued(admission, "urgent", order, Priority.HIGH))
    for _ in tasks:
        admission.leave(order[-1] if order else "first")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)

    assert order == ["urgent", "many", "few", "many", "many", "late"]
    assert (admission.admitted_requests, admission.waiting_requests) == (1, 0)


def full(config: AdmissionConfig) -> Admission:
    admission = Admission(config, lambda: 1)
    assert admission.enter_at_once("other")
    return admission


async def test_a_full_queue_refuses_at_once() -> None:
    admission = full(AdmissionConfig(waiting_requests_max=1))
    waiting = await queued(admission, "a", [])
    with pytest.raises(GatewayOverloaded, match="all engines are full and 1 requests wait"):
        await admission.enter("b", Priority.HIGH)

    assert admission.refused_total == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert admission.waiting_requests == 0


async def test_waiting_ends_at_its_deadline() -> None:
    admission = full(AdmissionConfig(normal_wait_seconds=0.001))
    with pytest.raises(GatewayOverloaded, match=r"full for 0\.001 s"):
        await admission.enter("a", Priority.NORMAL)

    assert (admission.admitted_requests, admission.waiting_requests) == (1, 0)


async def test_those_whose_wait_ends_together_are_refused_a_few_at_a_time() -> None:
    admission = full(AdmissionConfig(normal_wait_seconds=0.01))
    refused = [0]

    async def ask() -> None:
        with pytest.raises(GatewayOverloaded):
            await admission.enter("a", Priority.NORMAL)
        refused[-1] += 1

    tasks = [asyncio.create_task(ask()) for _ in range(5 * REFUSALS_PER_ITERATION)]
    await asyncio.sleep(0)
    time.sleep(0.02)  # noqa: ASYNC251 - the loop is busy when all are due
    while not all(task.done() for task in tasks):
        refused.append(0)
        await asyncio.sleep(0)
    assert sum(refused) == len(tasks)
    assert max(refused) <= REFUSALS_PER_ITERATION


async def test_a_place_given_to_one_who_leaves_goes_to_the_next() -> None:
    capacity = 0
    admission = Admission(AdmissionConfig(), lambda: capacity)
    order: list[str] = []
    gone, next_one = await queued(admission, "a", order), await queued(admission, "b", order)
    capacity = 1
    admission.wake()  # the place is a's
    gone.cancel()
    await asyncio.gather(gone, next_one, return_exceptions=True)

    assert order == ["b"]
    assert (admission.admitted_requests, admission.waiting_requests) == (1, 0)


async def test_one_who_left_in_the_same_turn_takes_no_place() -> None:
    capacity = 0
    admission = Admission(AdmissionConfig(), lambda: capacity)
    order: list[str] = []
    gone, next_one = await queued(admission, "a", order), await queued(admission, "b", order)
    capacity = 1
    gone.cancel()
    admission.wake()
    await asyncio.gather(gone, next_one, return_exceptions=True)

    assert order == ["b"]
    assert (admission.admitted_requests, admission.waiting_requests) == (1, 0)


async def test_requests_of_a_model_at_zero_wait_for_its_first_engine() -> None:
    """Requests wait longer for an engine than for room: none may be refused before one can have started."""
    capacity = 0
    admission = Admission(AdmissionConfig(normal_wait_seconds=0.001), lambda: capacity, lambda: 60.0)
    order: list[str] = []
    tasks = [await queued(admission, "a", order) for _ in range(2)]
    await asyncio.sleep(0.02)
    assert (admission.waiting_requests, admission.refused_total, order) == (2, 0, [])
    capacity = 1
    admission.wake()
    await tasks[0]
    assert (admission.waiting_requests, order) == (1, ["a"])
    admission.leave("a")
    await tasks[1]


async def test_an_engine_that_never_comes_is_named_as_the_reason() -> None:
    admission = Admission(AdmissionConfig(normal_wait_seconds=0.001), lambda: 0, lambda: 0.002)
    with pytest.raises(NoEngineReady, match=r"became ready within 0\.002 s"):
        await admission.enter("a", Priority.NORMAL)

    assert (admission.waiting_requests, admission.refused_total) == (0, 1)


async def test_lost_engines_that_do_not_return_in_time_are_not_called_full() -> None:
    config = AdmissionConfig(waiting_requests_max=1, normal_wait_seconds=0.01)
    admission = Admission(config, lambda: 0, return_seconds=lambda: 1000.0)
    waiting = asyncio.create_task(admission.enter("a", Priority.NORMAL))
    await asyncio.sleep(0)
    with pytest.raises(NoEngineReady, match="1 requests wait for one"):
        await admission.enter("a", Priority.NORMAL)
    with pytest.raises(NoEngineReady, match=r"became ready within 0\.01 s"):
        await waiting


async def test_requests_wait_for_lost_engines_to_return_and_pass_once_none_is_expected() -> None:
    """No event says that the time is over. A timer that is early looks again."""
    left = [0.001, 0.001, 0.001, 0.0]  # at each look; the last one stays

    def returning() -> float:
        return left.pop(0) if len(left) > 1 else left[0]

    admission = Admission(AdmissionConfig(), lambda: 0 if len(left) > 1 else 1, return_seconds=returning)
    order: list[str] = []
    tasks = [await queued(admission, "a", order) for _ in range(2)]
    await tasks[0]
    assert (left, admission.waiting_requests) == ([0.0], 1)
    admission.leave("a")
    await tasks[1]


async def test_of_one_tenants_requests_the_one_with_most_at_hand_goes_first_and_tenants_still_take_turns() -> None:
    now = 0.0
    admission = Admission(AdmissionConfig(), lambda: 1, clock=lambda: now)
    await admission.enter("first", Priority.NORMAL)
    order: list[str] = []

    async def go(tenant: str, name: str, tokens: int) -> None:
        await admission.enter(tenant, Priority.NORMAL, lambda: tokens)
        order.append(name)
        admitted.append(tenant)

    admitted = ["first"]
    waiting = [("many", "cold", 0), ("many", "warm", 100), ("many", "warmer", 900), ("few", "cold-of-few", 0)]
    tasks = [asyncio.create_task(go(*one)) for one in waiting]
    await asyncio.sleep(0)
    for at, _ in enumerate(tasks):
        if at == 2:
            now = OVERTAKE_SECONDS  # no request may be overtaken any more
        admission.leave(admitted.pop())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)

    assert order == ["warmer", "cold-of-few", "cold", "warm"]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 9_000), st.floats(0, 3)), min_size=1, max_size=40
    )
)
def test_nobody_is_overtaken_by_a_request_of_the_same_tenant_beyond_the_bound(
    steps: list[tuple[int, int, int, float]],
) -> None:
    """Requests of three tenants arrive, some leave the queue, and places become free, in any order."""

    async def scenario() -> None:
        now = 0.0
        admission = Admission(AdmissionConfig(normal_wait_seconds=1e6), lambda: 1, clock=lambda: now)
        await admission.enter("first", Priority.NORMAL)
        admitted = ["first"]
        tasks: dict[int, asyncio.Task[None]] = {}
        queued: dict[int, tuple[str, float]] = {}  # by number, in order of arrival

        async def go(number: int, tenant: str, tokens: int) -> None:
            await admission.enter(tenant, Priority.NORMAL, lambda: tokens)
            admitted.append(tenant)
            came = queued.pop(number)
            assert came[0] == tenant
            for other, arrived in queued.values():
                assert other != tenant or arrived >= came[1] or now - arrived < OVERTAKE_SECONDS

        async def settle() -> None:
            for _ in range(3):
                await asyncio.sleep(0)

        for number, (action, tenant, tokens, seconds) in enumerate(steps):
            now += seconds
            if action == 0:
                admission.leave(admitted.pop())
            elif action == 1 and queued:
                gone = sorted(queued)[tokens % len(queued)]
                del queued[gone]
                tasks[gone].cancel()
            else:
                queued[number] = (f"tenant-{tenant}", now)
                tasks[number] = asyncio.create_task(go(number, f"tenant-{tenant}", tokens))
            await settle()
            while not admission.admitted_requests:
                if not queued:
                    await admission.enter("first", Priority.NORMAL)
                    admitted.append("first")
                await settle()
        while queued:
            admission.leave(admitted.pop())
            await settle()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert not any(task.exception() for task in tasks.values() if not task.cancelled())
        assert admission.waiting_requests == 0

    asyncio.run(scenario())


FLOODING, OTHER = 1, 2  # sessions


async def test_a_flood_makes_neither_another_tenant_nor_another_session_of_its_own_wait() -> None:
    admission = Admission(AdmissionConfig(), lambda: 16)
    flood = [
        asyncio.create_task(admission.enter("a", Priority.NORMAL, session=FLOODING if number < 20 else None))
        for number in range(40)
    ]
    await asyncio.sleep(0)
    assert (admission.admitted_requests, admission.waiting_requests) == (16, 24)

    entered = [
        admission.enter_at_once("a", OTHER),
        admission.enter_at_once("a", OTHER),  # has one already
        admission.enter_at_once("a", 3),
        admission.enter_at_once("a", 4),  # two for sessions are all
        admission.enter_at_once("b", 5),
        admission.enter_at_once("b", 5),
        admission.enter_at_once("c"),
        admission.enter_at_once("d"),  # two more for tenants are all
    ]
    assert entered == [True, False, True, False, True, False, True, False]
    admission.leave("c")
    assert admission.waiting_requests == 24, "who came beyond the room makes none when it leaves"
    assert not admission.enter_at_once("d", None, Priority.LOW), "requests of a higher priority wait"
    assert admission.enter_at_once("d", None, Priority.HIGH)
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from("abc"), st.sampled_from([None, 1, 2]), st.integers(0, 30)),
        max_size=80,
    ),
    st.integers(0, 24),
)
def test_no_more_than_a_quarter_beyond_the_room_enters_and_nothing_is_remembered_of_who_left(
    steps: list[tuple[bool, str, int | None, int]], room: int
) -> None:
    admission = Admission(AdmissionConfig(), lambda: room)
    inside: list[tuple[str, int | None]] = []
    for comes, tenant, session, at in steps:
        if comes:
            had = [one for one in inside if one[0] == tenant]
            full = len(inside) - len(admission._beyond) >= room
            if admission.enter_at_once(tenant, session):
                assert not full or not had or (session is not None and (tenant, session) not in inside)
                inside.append((tenant, session))
        elif inside:
            admission.leave(*inside.pop(at % len(inside)))
        assert admission.admitted_requests == len(inside) <= room + 2 * (room // 8)
    while inside:
        admission.leave(*inside.pop())
    assert not admission._admitted and not admission._beyond


async def test_newcomers_without_end_starve_nobody_who_waits() -> None:
    admission = Admission(AdmissionConfig(), lambda: 8)
    for _ in range(8):
        assert admission.enter_at_once("flood")
    order: list[str] = []
    waiting = await queued(admission, "flood", order)
    assert admission.enter_at_once("new 0") and admission.enter_at_once("new 1")
    for number in range(2, 20):  # one comes for each that leaves
        admission.leave(f"new {number - 2}")
        assert admission.enter_at_once(f"new {number}")
    admission.leave("flood")
    await asyncio.wait_for(waiting, 5)
    assert order == ["flood"] and not admission.enter_at_once("new 20")


async def test_an_engine_that_has_room_for_many_takes_them_over_iterations_of_the_event_loop() -> None:
    """The choice of each next request takes a look-up; streams would wait for all of them."""
    requests, look_seconds = 40, 0.001
    now, room, looks = [0.0], [0], [0]

    def look() -> int:
        now[0] += look_seconds
        looks[-1] += 1
        return 0

    admission = Admission(AdmissionConfig(), lambda: room[0], clock=lambda: now[0])
    waiting = [asyncio.create_task(admission.enter("a", Priority.NORMAL, look)) for _ in range(requests)]
    await asyncio.sleep(0)
    room[0] = requests
    admission.wake()
    admission.wake()  # another engine, before the first one has all of its requests
    while admission.waiting_requests:
        looks.append(0)
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)

    assert admission.admitted_requests == requests
    assert max(looks) <= CANDIDATES_MAX + ADMITTING_SECONDS_MAX / look_seconds
