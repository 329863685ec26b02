"""Prompts take turns on the tokenizer's threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Iterator

import pytest

from spillway_gateway.tokens.fair_threads import FairThreads


@pytest.fixture
def threads() -> Iterator[FairThreads]:
    made = FairThreads(1, "test")
    yield made
    made.close()


def job(name: str, steps: int, log: list[str], gate: threading.Event) -> Generator[None, None, str]:
    for _ in range(steps):
        assert gate.wait(60)
        log.append(name)
        yield
    return name


async def test_groups_take_turns_and_jobs_of_a_group_do(threads: FairThreads) -> None:
    log: list[str] = []
    gate = threading.Event()
    running = [
        threads.run(group, job(name, steps, log, gate))
        for group, name, steps in (("a", "a1", 4), ("a", "a2", 2), ("a", "a3", 1), ("b", "b1", 2))
    ]
    gate.set()

    assert await asyncio.gather(*running) == ["a1", "a2", "a3", "b1"]
    assert [name for name in log if name != "b1"] == ["a1", "a2", "a3", "a1", "a2", "a1", "a1"]
    assert log.index("b1") <= 2  # after the step that was begun and one more
    assert [at for at, name in enumerate(log) if name == "b1"][1] <= 4


async def test_a_cancelled_future_ends_the_work(threads: FairThreads) -> None:
    log: list[str] = []
    gate = threading.Event()
    long = threads.run("a", job("long", 1_000_000, log, gate))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(long, 0)
    gate.set()

    assert await threads.run("b", job("short", 3, log, gate)) == "short"
    assert log.count("long") <= 1


async def test_a_panic_of_a_library_ends_its_job_alone(threads: FairThreads) -> None:
    class Panic(BaseException):
        pass

    def failing() -> Generator[None, None, str]:
        yield
        raise Panic("index out of bounds")

    with pytest.raises(RuntimeError, match="Panic: index out of bounds"):
        await threads.run("a", failing())
    gate = threading.Event()
    gate.set()
    assert await threads.run("a", job("next", 2, [], gate)) == "next"


async def test_errors_are_the_askers(threads: FairThreads) -> None:
    def failing() -> Generator[None, None, str]:
        yield
        raise RecursionError

    with pytest.raises(RecursionError):
        await threads.run("a", failing())


async def test_closed_threads_take_nothing(threads: FairThreads) -> None:
    threads.close()
    with pytest.raises(asyncio.CancelledError):
        await threads.run("a", job("x", 1, [], threading.Event()))
