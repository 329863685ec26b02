from __future__ import annotations

import asyncio
from collections.abc import Iterator

from spillway_gateway.fleet.steps import WAITING_MAX, Steps


def counted(done: list[str], name: str, steps: int) -> Iterator[None]:
    for number in range(steps):
        if number:
            yield
        done.append(name)


def test_work_of_one_step_is_done_at_once_without_an_event_loop() -> None:
    done: list[str] = []

    Steps().run(counted(done, "a", 1))

    assert done == ["a"]


async def test_what_no_client_waits_for_begins_once_the_present_callback_has_ended() -> None:
    done: list[str] = []
    Steps().soon(counted(done, "a", 1))
    assert done == []
    await asyncio.sleep(0)
    assert done == ["a"]


def test_it_is_done_at_once_in_virtual_time() -> None:
    done: list[str] = []
    Steps().soon(counted(done, "a", 1))
    assert done == ["a"]


async def test_one_step_is_taken_in_an_iteration_however_much_waits() -> None:
    done: list[str] = []
    steps = Steps()
    for name in "abc":
        steps.run(counted(done, name, 3))
    assert done == ["a"]

    for taken in range(2, 10):
        await asyncio.sleep(0)
        assert len(done) <= taken
    for _ in range(10):
        await asyncio.sleep(0)
    assert done == [*"aaa", *"bbb", *"ccc"]


async def test_no_more_waits_than_is_allowed() -> None:
    done: list[str] = []
    steps = Steps()
    for number in range(WAITING_MAX + 5):
        steps.run(counted(done, str(number), 2))
    for _ in range(3 * WAITING_MAX):
        await asyncio.sleep(0)

    assert done[-1] == str(WAITING_MAX + 4)
    assert sum(done.count(name) == 2 for name in set(done)) == WAITING_MAX
