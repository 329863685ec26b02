"""Answers of chat templates that keep the thinking of earlier turns, and that strip it: what is decided, and when."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan.answers import ANSWERS_MAX, COUNTED_MIN, SENT_BACK_SHARE_MIN, AnswerReuse

CHUNK = 16  # characters, as tokens
_TURNS = "{% for m in messages %}<{{ m.role }}>{% if m.thinking and THINKS %}[{{ m.thinking }}]{% endif %}{{ m.text }}"
KEEPS = _TURNS.replace("THINKS", "true") + "{% endfor %}<assistant>"
STRIPS = _TURNS.replace("THINKS", "false") + "{% endfor %}<assistant>"
STRIPS_BEFORE_THE_LAST_QUESTION = _TURNS.replace("THINKS", "loop.index0 > last_question") + "{% endfor %}<assistant>"


def chunk_keys(text: str) -> list[bytes]:
    """Keys of the full chunks, each of which covers all before it."""
    return [hashlib.sha256(text[:end].encode()).digest() for end in range(CHUNK, len(text) + 1, CHUNK)]


class Engine:
    """Serves chats whose prompts a template renders; answers think, then speak."""

    def __init__(self, template: str, named: bool = True) -> None:
        self.template = jinja2.Environment(autoescape=False).from_string(template)
        self.named = named
        self.reuse = AnswerReuse()
        self.answers = 0

    def ask(self, session: str, messages: list[dict[str, str]]) -> None:
        questions = [at for at, message in enumerate(messages) if message["role"] == "user"]
        prompt = self.template.render(messages=messages, last_question=questions[-1])
        name = session if self.named else None
        self.reuse.requested(chunk_keys(prompt), name)
        self.answers += 1
        answer = {"role": "assistant", "thinking": f"hm {self.answers} " * 5, "text": f"it is {self.answers} " * 5}
        generated = f"[{answer['thinking']}]{answer['text']}"
        self.reuse.answered(chunk_keys(prompt + generated)[len(prompt) // CHUNK], name)
        messages.append(answer)

    def chat(self, session: str, turns: int, tool_calls: int = 0) -> None:
        messages: list[dict[str, str]] = [{"role": "system", "text": "You help. " * 8}]
        for turn in range(turns):
            messages.append({"role": "user", "text": f"{session} asks {turn}"})
            self.ask(session, messages)
            for call in range(tool_calls):
                messages.append({"role": "tool", "text": f"result {call}"})
                self.ask(session, messages)


def answers_until(engine: Engine, done: Callable[[AnswerReuse], bool], chats: int = 100, **chat: int) -> int:
    for number in range(chats):
        engine.chat(f"user {number}", **chat)
        if done(engine.reuse):
            break
    return engine.answers


@pytest.mark.parametrize("named", [True, False])
def test_a_template_that_keeps_thinking_keeps_answers(named: bool):
    engine = Engine(KEEPS, named)
    answers_until(engine, lambda reuse: False, turns=5)

    assert engine.reuse.keeps
    share = engine.reuse.sent_back_share
    assert share is not None and share >= 0.75  # all but each chat's last


def test_a_template_that_strips_thinking_gives_answers_up_after_few():
    engine = Engine(STRIPS)
    answers = answers_until(engine, lambda reuse: not reuse.keeps, turns=5)

    assert not engine.reuse.keeps and engine.reuse.sent_back_share == 0
    assert COUNTED_MIN < answers <= COUNTED_MIN * 5 / 4 + 5, "each turn but a chat's last settles one"


def test_without_names_it_takes_as_many_as_are_remembered():
    engine = Engine(STRIPS, named=False)
    answers = answers_until(engine, lambda reuse: not reuse.keeps, turns=5)

    assert not engine.reuse.keeps and ANSWERS_MAX < answers <= ANSWERS_MAX + COUNTED_MIN + 5


@pytest.mark.parametrize(("tool_calls", "keeps"), [(0, False), (4, True)])
def test_thinking_that_is_kept_within_a_turn_counts(tool_calls: int, keeps: bool):
    """Many templates strip it before the last question alone: agents that call tools send it back, chats do not."""
    engine = Engine(STRIPS_BEFORE_THE_LAST_QUESTION)
    answers_until(engine, lambda reuse: False, chats=40, turns=4, tool_calls=tool_calls)
    assert engine.reuse.keeps is keeps


def test_batch_jobs_send_nothing_back():
    engine = Engine(KEEPS, named=False)
    answers_until(engine, lambda reuse: not reuse.keeps, chats=400, turns=1)
    assert not engine.reuse.keeps


def test_it_is_kept_again_when_answers_come_back():
    engine = Engine(STRIPS)
    answers_until(engine, lambda reuse: not reuse.keeps, turns=5)
    engine.template = Engine(KEEPS).template
    answers_until(engine, lambda reuse: reuse.keeps, chats=200, turns=5)
    assert engine.reuse.keeps


def test_a_subagent_between_two_turns_makes_no_answer_a_lost_one():
    reuse = AnswerReuse()
    for number in range(COUNTED_MIN):
        main = b"answer %d" % number
        reuse.answered(main, "session")
        reuse.requested([b"subagent %d" % number], "session")
        reuse.requested([b"prompt", main], "session")

    assert reuse.sent_back_share == 1.0 and reuse.keeps


steps = st.lists(
    st.tuples(
        st.booleans(),
        st.lists(st.integers(0, 20), min_size=1, max_size=4, unique=True),
        st.sampled_from([None, "a", "b"]),
    ),
    max_size=200,
)


def key_of(numbers: Sequence[int]) -> bytes:
    return bytes(numbers)


@given(steps)
def test_nothing_is_decided_before_enough_has_been_measured_and_memory_is_bounded(steps):
    reuse = AnswerReuse()
    for is_answer, numbers, session in steps:
        if is_answer:
            reuse.answered(key_of(numbers[:1]), session)
        else:
            reuse.requested([key_of([number]) for number in numbers], session)
        share = reuse.sent_back_share
        assert share is None or 0 <= share <= 1
        assert reuse.keeps or (share is not None and share < 0.4)
        assert not (share is not None and share < SENT_BACK_SHARE_MIN and reuse.keeps)
        assert set(reuse._newest.values()) <= reuse._answers.keys() and len(reuse._answers) <= ANSWERS_MAX
