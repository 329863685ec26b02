"""Conversations of several turns, as in the reports of vllm-ascend's #7819 and #10575, and their figures.

A client takes the next conversation when it has finished one. A conversation begins with tokens shared by all and some
of its own; each turn adds the answer and new tokens.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock


@dataclass(frozen=True, slots=True)
class Shape:
    """A load; tokens throughout. Conversations: three times the clients."""

    shared: int = 512
    own: tuple[int, int] = (1_500, 5_500)
    added: tuple[int, int] = (96, 160)
    answer: int = 48
    turns: int = 6
    vocabulary: tuple[int, int] = (1_000, 150_000)

    @property
    def tokens_max(self) -> int:
        """The tokens of the longest conversation, with its last answer."""
        return self.shared + self.own[1] + self.answer + (self.turns - 1) * (self.added[1] + self.answer)


REPORTED = Shape()
SMALL = Shape(shared=64, own=(96, 160), added=(16, 40), answer=4, turns=3, vocabulary=(3, 500))


@dataclass(frozen=True, slots=True)
class Turn:
    number: int  # from 0
    prompt_tokens: int
    cached_tokens: int
    first_token_seconds: float
    per_token_seconds: float  # of those after the first


class Conversations:
    """The clients' messages; the same for every engine, different for every number of clients."""

    def __init__(self, shape: Shape, clients: int) -> None:
        self._shape = shape
        self._dice = random.Random(f"{clients} clients")  # noqa: S311 - a load, no secret
        self._shared = self._words(shape.shared)
        self.openings = [self._shared + self._words(self._dice.randint(*shape.own)) for _ in range(3 * clients)]
        self.additions = [
            [self._words(self._dice.randint(*shape.added)) for _ in range(shape.turns - 1)] for _ in self.openings
        ]

    def _words(self, count: int) -> list[int]:
        return [self._dice.randrange(*self._shape.vocabulary) for _ in range(count)]


# (number of the turn, prompt) -> the turn and its answer
Ask = Callable[[int, list[int]], tuple[Turn, list[int]]]


def converse(ask: Ask, shape: Shape, clients: int) -> tuple[list[Turn], float]:
    """Every turn, and the seconds of the whole load. Raises what `ask` raises."""
    conversations = Conversations(shape, clients)
    waiting = iter(zip(conversations.openings, conversations.additions, strict=True))
    lock = Lock()

    def next_one() -> tuple[list[int], list[list[int]]] | None:
        with lock:
            return next(waiting, None)

    def client() -> Iterator[Turn]:
        while (taken := next_one()) is not None:
            opening, additions = taken
            prompt = list(opening)
            for number in range(shape.turns):
                turn, answer = ask(number, prompt)
                yield turn
                if number < len(additions):
                    prompt += answer + additions[number]

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        turns = [turn for done in threads.map(lambda _: list(client()), range(clients)) for turn in done]
    return turns, time.perf_counter() - started


def figures(turns: Sequence[Turn], seconds: float) -> dict[str, float]:
    first = [turn.first_token_seconds * 1e3 for turn in turns]
    asked = sum(turn.prompt_tokens for turn in turns)
    return {
        "ttft_mean_ms": round(statistics.fmean(first), 1),
        "ttft_median_ms": round(statistics.median(first), 1),
        "ttft_p90_ms": round(statistics.quantiles(first, n=10)[-1], 1),
        "tpot_mean_ms": round(statistics.fmean(turn.per_token_seconds for turn in turns) * 1e3, 2),
        "cached_share": round(sum(turn.cached_tokens for turn in turns) / asked, 3),
        "turns_per_second": round(len(turns) / seconds, 2),
    }
