from __future__ import annotations

from collections.abc import Iterator

import pytest

from spillway_connector.tiers.disk.inspection import in_order
from spillway_connector.tiers.inspection import StoredFrame


def frame(number: int) -> StoredFrame:
    return StoredFrame(bytes(16), number, f"place-{number}", number)


def test_looking_in_threads_keeps_the_order_and_leaves_out_what_has_gone() -> None:
    def look(one: StoredFrame) -> StoredFrame | None:
        return None if one.stored_bytes % 7 == 0 else one

    found = in_order((frame(number) for number in range(5000)), look)
    assert [one.stored_bytes for one in found] == [number for number in range(5000) if number % 7]
    assert list(in_order(iter(()), look)) == []


def test_looking_in_threads_runs_ahead_by_a_bounded_number() -> None:
    taken = 0

    def endless() -> Iterator[StoredFrame]:
        nonlocal taken
        while True:
            taken += 1
            yield frame(taken)

    found = in_order(endless(), lambda one: one)
    for _ in range(10):
        next(found)
    assert taken <= 16 * 64
    found.close()


def test_an_error_in_a_thread_reaches_the_caller() -> None:
    def look(one: StoredFrame) -> StoredFrame | None:
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        list(in_order(iter([frame(1)]), look))
