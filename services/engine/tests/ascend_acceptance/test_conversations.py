import threading
from dataclasses import replace

import pytest

from spillway_engine.ascend_acceptance.conversations import REPORTED, SMALL, Conversations, Turn, converse, figures


def test_every_engine_is_asked_the_same() -> None:
    assert Conversations(SMALL, 2).openings == Conversations(SMALL, 2).openings
    assert Conversations(SMALL, 2).openings != Conversations(SMALL, 3).openings[:6]


@pytest.mark.parametrize("shape", [SMALL, REPORTED])
def test_a_conversation_begins_with_what_all_share_and_stays_within_its_bound(shape) -> None:
    conversations = Conversations(shape, 2)
    assert len({tuple(opening[: shape.shared]) for opening in conversations.openings}) == 1
    for opening, additions in zip(conversations.openings, conversations.additions, strict=True):
        asked = len(opening) + sum(map(len, additions)) + shape.answer * shape.turns
        assert asked <= shape.tokens_max
        assert all(shape.vocabulary[0] <= token < shape.vocabulary[1] for token in opening)


def test_each_turn_has_the_history_and_the_answers_before_it() -> None:
    asked: list[tuple[int, list[int]]] = []
    lock = threading.Lock()

    def ask(number: int, prompt: list[int]) -> tuple[Turn, list[int]]:
        with lock:
            asked.append((number, list(prompt)))
        return Turn(number, len(prompt), 0, 0.5, 0.1), [2] * SMALL.answer

    turns, _ = converse(ask, replace(SMALL, turns=2), clients=2)

    assert len(turns) == len(asked) == 2 * 6
    openings = [prompt for number, prompt in asked if number == 0]
    for number, prompt in asked:
        if number == 1:
            [opening] = [one for one in openings if prompt[: len(one)] == one]
            assert prompt[len(opening) : len(opening) + SMALL.answer] == [2] * SMALL.answer


def test_a_request_that_fails_ends_the_load() -> None:
    def ask(number: int, prompt: list[int]) -> tuple[Turn, list[int]]:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        converse(ask, SMALL, clients=2)


def test_figures_have_their_units() -> None:
    turns = [Turn(0, 100, 0, 0.2, 0.01), Turn(1, 100, 50, 0.1, 0.03)]
    assert figures(turns, seconds=4.0) == {
        "ttft_mean_ms": 150.0,
        "ttft_median_ms": 150.0,
        "ttft_p90_ms": 270.0,
        "tpot_mean_ms": 20.0,
        "cached_share": 0.25,
        "turns_per_second": 0.5,
    }
