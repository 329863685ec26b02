"""The common structure of all traces: sessions of turns; each turn's prompt is the conversation so far and new text.

Content is generated from seeds on demand, so a trace of a hundred million tokens takes a few megabytes.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """`tokens` token ids that follow from `seed` alone; segments of equal seed start alike, whatever their length."""

    seed: str
    tokens: int

    def ids(self) -> array[int]:
        return array("I", random.Random(self.seed).randbytes(4 * self.tokens))


@dataclass(frozen=True, slots=True)
class Turn:
    """added: the client's new message. pause_seconds: from the end of the previous answer to this request."""

    added: tuple[Segment, ...]
    answer: Segment
    pause_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """start_seconds: when the first turn is sent."""

    name: str
    start_seconds: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    about: str
    sessions: tuple[Session, ...]

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def prompt_tokens(self) -> int:
        total = 0
        for session in self.sessions:
            context = 0
            for turn in session.turns:
                context += sum(segment.tokens for segment in turn.added)
                total += context
                context += turn.answer.tokens
        return total
