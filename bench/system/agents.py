"""Agents in a closed loop: what each session asks, and when. The HTTP load (load_generator.py) has the same shape.

All sessions begin with the same system prompt. The first message is long, every later one is what a tool returned; an
answer is part of the next prompt, as other tokens than those that were generated, as text that is tokenised again is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from traces.session import Segment

THINK_MAX = 4.0  # times the mean


@dataclass(frozen=True, slots=True)
class AgentLoad:
    """`sessions` at a time; when one ends, its place begins the next. Seconds of load; ramp: in which they begin.

    crowd: places of another tenant beside the sessions', each of which asks one prompt after the other without a pause,
    of crowd_tokens (least, most) behind the system prompt, or without it if the crowd is cold.

    retaining: the first places; they ask to retain their prompts, and think retaining_think_times as long as others.
    answers_return: as the tokens that were generated. crowd_programs: that the crowd is.
    """

    sessions: int = 64
    seconds: float = 100.0
    ramp_seconds: float = 8.0
    common_tokens: int = 4_000
    own_tokens: int = 6_000
    turn_tokens: int = 1_000
    answer_tokens: int = 64
    turns: int = 12
    think_seconds: float = 1.0
    seed: int = 1
    crowd: int = 0
    crowd_tokens: tuple[int, int] = (200, 600)
    crowd_is_cold: bool = False
    retaining: int = 0
    retaining_think_times: float = 10.0
    answers_return: bool = False
    crowd_programs: int = 1

    @property
    def places(self) -> int:
        return self.sessions + self.crowd

    def is_crowd(self, place: int) -> bool:
        return place >= self.sessions

    def program(self, place: int) -> str:
        return f"crowd {place % self.crowd_programs}" if self.is_crowd(place) else str(place)

    def retains(self, place: int) -> bool:
        return place < self.retaining

    def start_of(self, place: int) -> float:
        return random.Random(self.seed * 100_003 + place).random() * self.ramp_seconds

    def common(self, place: int) -> Segment:
        cold = self.crowd_is_cold and self.is_crowd(place)
        return Segment(f"common-{self.seed}", 0 if cold else self.common_tokens)

    def session(self, place: int, number: int) -> Iterator[tuple[Segment, float]]:
        """Each turn's message, and the pause behind its answer. The first session of a place is shorter, so that
        places do not end together."""
        rng = random.Random(f"{self.seed} {place} {number}")
        if self.is_crowd(place):
            yield Segment(f"{self.seed}-{place}-{number}", rng.randint(*self.crowd_tokens)), 0.0
            return
        think = self.think_seconds * (self.retaining_think_times if self.retains(place) else 1.0)
        turns = self.turns if number else rng.randrange(self.turns // 3, self.turns + 1)
        for turn in range(turns):
            tokens = self.turn_tokens + (0 if turn else self.own_tokens)
            pause = min(THINK_MAX * think, rng.expovariate(1 / think))
            yield Segment(f"{self.seed}-{place}-{number}-{turn}", tokens), pause

    def answer(self, place: int, number: int, turn: int) -> Segment:
        """Return the answer as it stands in the next prompt."""
        if self.answers_return:
            return self.generated(place, number, turn)
        return Segment(f"answer-{self.seed}-{place}-{number}-{turn}", self.answer_tokens)

    def generated(self, place: int, number: int, turn: int) -> Segment:
        """Return the answer as the engine generates it."""
        return Segment(f"generated-{place}/{number}/{turn}", self.answer_tokens)
