"""Prompts of bench/chat_turns.py to engines that count answers, and its use of their count; no engine runs here."""

from __future__ import annotations

import argparse
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import chat_turns
import pytest

ANSWER = list(range(500, 500 + chat_turns.THINKING_ANSWER_TOKENS))


class Engine:
    """Remembers its prompts; keeps answers until so many were given."""

    settings = SimpleNamespace(engine_port=lambda engine: 1)
    model = SimpleNamespace(served_name="m")

    def __init__(self, kept_answers: int) -> None:
        self.prompts: list[list[int]] = []
        self.kept_answers = kept_answers
        self._lock = threading.Lock()

    def ask(self, port: int, model: str, prompt: list[int], answer: int) -> Any:
        with self._lock:
            self.prompts.append(prompt)
        return SimpleNamespace(tokens=ANSWER[:answer])

    def kept(self, stack: object) -> tuple[bool, float | None]:
        answers = sum(1 for prompt in self.prompts if len(prompt) == chat_turns.THINKING_PROMPT_TOKENS)
        return answers < self.kept_answers, None if answers < self.kept_answers else 0.125


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine(kept_answers=5)
    monkeypatch.setattr(chat_turns, "ask", engine.ask)
    return engine


@pytest.mark.parametrize(("name", "comes_back"), [("keeps", ANSWER), ("strips", ANSWER[len(ANSWER) // 2 :])])
def test_the_second_turn_goes_on_with_the_answer_or_without_its_beginning(
    engine: Engine, name: str, comes_back: list[int]
) -> None:
    chat_turns._two_turns(engine, name, itertools.count(), 1)  # type: ignore[arg-type]

    first, second = engine.prompts
    assert second[: len(first) + len(comes_back)] == [*first, *comes_back]
    assert len(second) == len(first) + len(comes_back) + chat_turns.PROMPT_TOKENS


def test_the_answers_until_none_is_kept_are_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_turns, "_kept", engine.kept)
    report: chat_turns.Report = {}
    given = argparse.Namespace(requests=2, answers=8)
    table = chat_turns.think({"strips": engine, "prompts": engine}, given, report)  # type: ignore[dict-item]

    assert report == {"strips_answers_kept": 0, "strips_kept_until_answers_count": 4, "strips_sent_back_share": 0.125}
    assert "prompts" not in table
