"""Writes that are deferred to the end of an event loop iteration, and when they are."""

from __future__ import annotations

import asyncio

import pytest

from spillway_gateway.write_coalescing import WriteCoalescer


async def test_all_writes_of_an_iteration_are_sent_at_its_end_in_their_order() -> None:
    coalescer = WriteCoalescer.of_running_loop()
    sent: list[int] = []
    coalescer.defer(lambda: sent.append(1))
    coalescer.defer(lambda: sent.append(2))
    assert sent == []

    await asyncio.sleep(0)
    assert sent == [1, 2]

    coalescer.defer(lambda: sent.append(3))
    await asyncio.sleep(0)
    assert sent == [1, 2, 3]


async def test_a_write_that_fails_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    coalescer = WriteCoalescer.of_running_loop()
    sent: list[int] = []

    def broken() -> None:
        raise RuntimeError("this transport is no more")

    coalescer.defer(broken)
    coalescer.defer(lambda: sent.append(1))
    await asyncio.sleep(0)

    assert sent == [1] and "a write failed" in caplog.text


async def test_a_single_request_defers_nothing() -> None:
    coalescer = WriteCoalescer.of_running_loop()
    assert not coalescer.active
    coalescer.begin_request()
    assert not coalescer.active
    coalescer.begin_request()
    assert coalescer.active


def test_each_loop_has_its_own() -> None:
    async def of_this_loop() -> WriteCoalescer:
        assert WriteCoalescer.of_running_loop() is WriteCoalescer.of_running_loop()
        return WriteCoalescer.of_running_loop()

    assert asyncio.run(of_this_loop()) is not asyncio.run(of_this_loop())
