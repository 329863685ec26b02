"""Questions whose answer by the bundled model has no near tie in float32.

Tests that compare texts of real engines ask one of these. `python -m reference_answers` measures them and writes
questions.json; a question with a near tie is refused there, and by a test.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spillway_engine.chat_answers import ANSWER_TOKENS, QUESTION

from .margins import MARGIN_LEAST

CAPITAL = QUESTION
QUESTIONS = (CAPITAL,)
TOKENS_MAX = ANSWER_TOKENS
RECORD = Path(__file__).with_name("questions.json")


class NearTie(Exception):
    """A token of the answer leads its runner-up by too little to be compared."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The greedy answer to one question, with the lead of each token, its end included (natural logarithm)."""

    question: str
    answer: str
    margins: tuple[float, ...]

    def require_margin(self) -> Measured:
        """Raises NearTie."""
        for position, margin in enumerate(self.margins):
            if margin < MARGIN_LEAST:
                raise NearTie(
                    f"{self.question!r} -> {self.answer!r}: token {position + 1} leads by {margin:.3f}, "
                    f"{MARGIN_LEAST} is needed; choose a question with a larger margin"
                )
        return self


def write_record(measured: Sequence[Measured], origin: str) -> None:
    """Raises NearTie, and writes nothing then."""
    rows = [
        {"question": one.question, "answer": one.answer, "margins": [round(margin, 4) for margin in one.margins]}
        for one in (one.require_margin() for one in measured)
    ]
    RECORD.write_text(json.dumps({"origin": origin, "questions": rows}, indent=1) + "\n")


def read_record() -> list[Measured]:
    rows = json.loads(RECORD.read_text())["questions"]
    return [Measured(row["question"], row["answer"], tuple(row["margins"])) for row in rows]
