from __future__ import annotations

import threading

import pytest

from spillway_connector.errors import TierMiss, TierTimeout, TierUnreachable, UnreachableReason
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.tiers.redis.client.discovery import RENEWAL_SECONDS, Discovery, first_answer
from spillway_connector.tiers.redis.client.endpoint import Address

ADDRESSES = [Address("a", 1), Address("b", 2), Address("c", 3)]


def _unreachable() -> TierUnreachable:
    return TierUnreachable(UnreachableReason.CONNECT, "away")


def test_it_asks_once_and_again_only_when_suspected_and_not_too_often() -> None:
    clock = SteppedClock()
    asked: list[float] = []

    def ask(deadline: float) -> int:
        asked.append(deadline)
        return len(asked)

    discovery = Discovery(ask, clock)
    assert [discovery.get(clock() + 9) for _ in range(3)] == [1, 1, 1]
    for _ in range(5):
        discovery.suspect()
        assert discovery.get(clock() + 9) == 1  # asked only just now
    clock.advance(RENEWAL_SECONDS)
    assert [discovery.get(clock() + 9) for _ in range(3)] == [2, 2, 2]
    clock.advance(100)
    assert discovery.get(clock() + 9) == 2
    assert len(asked) == 2


def test_the_last_result_stays_when_no_server_answers() -> None:
    clock = SteppedClock()
    answers: list[int | None] = [None, 7, None, 8]

    def ask(deadline: float) -> int:
        answer = answers.pop(0)
        if answer is None:
            raise _unreachable()
        return answer

    discovery = Discovery(ask, clock)
    with pytest.raises(TierUnreachable):
        discovery.get(clock() + 9)
    assert discovery.get(clock() + 9) == 7
    discovery.suspect()
    clock.advance(RENEWAL_SECONDS)
    assert discovery.get(clock() + 9) == 7  # no server answered: the last result
    assert discovery.get(clock() + 9) == 7
    clock.advance(RENEWAL_SECONDS)
    assert discovery.get(clock() + 9) == 8


def test_a_thread_waits_for_anothers_discovery_only_until_its_deadline() -> None:
    clock = SteppedClock()
    begun, go_on = threading.Event(), threading.Event()

    def ask(deadline: float) -> int:
        begun.set()
        go_on.wait(60)
        return 1

    discovery = Discovery(ask, clock)
    thread = threading.Thread(target=lambda: discovery.get(clock() + 9))
    thread.start()
    begun.wait(60)
    with pytest.raises(TierTimeout):
        discovery.get(clock())
    go_on.set()
    thread.join(60)
    assert discovery.get(clock() + 9) == 1


def test_each_server_gets_its_share_of_the_time_left() -> None:
    clock = SteppedClock(0.0)
    shares: list[float] = []

    def ask(address: Address, deadline: float) -> str:
        shares.append(deadline - clock())
        if address is ADDRESSES[2]:
            return "found"
        clock.advance(deadline - clock())  # silent until its share is used up
        raise TierTimeout("silent")

    assert first_answer(ADDRESSES, ask, clock, 9.0) == "found"
    assert shares == [3.0, 3.0, 3.0]


def test_when_no_server_answers_the_last_failure_is_raised() -> None:
    failures = [_unreachable(), TierMiss("one"), TierMiss("two")]

    def ask(address: Address, deadline: float) -> str:
        raise failures.pop(0)

    with pytest.raises(TierMiss, match="two"):
        first_answer(ADDRESSES, ask, SteppedClock(0.0), 9.0)
    with pytest.raises(TierTimeout):
        first_answer(ADDRESSES, ask, SteppedClock(9.0), 9.0)
