"""Writes that wait for the end of the loop's turn, and those that do not."""

from __future__ import annotations

import asyncio

import pytest

from spillway_gateway.write_coalescing import TurnWrites


async def test_all_writes_of_a_turn_leave_at_its_end_in_their_order() -> None:
    turn = TurnWrites.here()
    sent: list[int] = []
    turn.at_end(lambda: sent.append(1))
    turn.at_end(lambda: sent.append(2))
    assert sent == []

    await asyncio.sleep(0)
    assert sent == [1, 2]

    turn.at_end(lambda: sent.append(3))
    await asyncio.sleep(0)
    assert sent == [1, 2, 3]


async def test_a_write_that_fails_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    turn = TurnWrites.here()
    sent: list[int] = []

    def broken() -> None:
        raise RuntimeError("this transport is no more")

    turn.at_end(broken)
    turn.at_end(lambda: sent.append(1))
    await asyncio.sleep(0)

    assert sent == [1] and "a write failed" in caplog.text


async def test_a_single_request_shares_its_turn_with_nobody() -> None:
    turn = TurnWrites.here()
    assert not turn.shared
    turn.requests = 1
    assert not turn.shared
    turn.requests = 2
    assert turn.shared


def test_each_loop_has_its_own() -> None:
    async def here() -> TurnWrites:
        assert TurnWrites.here() is TurnWrites.here()
        return TurnWrites.here()

    assert asyncio.run(here()) is not asyncio.run(here())
