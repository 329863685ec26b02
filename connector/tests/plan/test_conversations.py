from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan.conversations import Conversations


def prompt(*texts: str) -> list[bytes]:
    """The hashes of the blocks of a prompt, each of one letter: a hash covers all before it."""
    return [block.encode() for block in itertools.accumulate("".join(texts))]


def test_a_prompt_that_begins_with_the_one_before_is_the_next_turn():
    conversations = Conversations()
    conversations.session_of(prompt("system ", "hello"))
    second = conversations.session_of(prompt("system ", "hello", " Hi! And now?"))
    assert second is not None
    assert conversations.session_of(prompt("system ", "hello", " Hi! And now?", " Done.")) == second
    assert conversations.session_of(prompt("system ", "hello", " Hi! And now?", " Done.")) == second, "asked again"


def test_the_last_block_may_be_written_differently_by_the_next_turn():
    conversations = Conversations()
    assert conversations.session_of(prompt("hello<think>")) is None
    assert conversations.session_of(prompt("hello<think", "Hi. And now?")) is not None


def test_a_shared_beginning_is_no_conversation():
    conversations = Conversations()
    system = prompt("the system prompt that all share")
    assert conversations.session_of(system) is None, "none before it came back"
    assert conversations.session_of([*system, *prompt("!one")]) is not None, "as a second turn would"
    names = {conversations.session_of([*system, *prompt(f"?{number} {'x' * number}")]) for number in range(40)}
    assert len(names) > 1, "each begins on its own"
    assert conversations.session_of([*system, *prompt("another")]) is None, "and most never come back"


def test_two_that_go_on_from_one_prompt_are_two_conversations():
    conversations = Conversations()
    conversations.session_of(prompt("task"))
    first = conversations.session_of(prompt("task", " first agent"))
    second = conversations.session_of(prompt("task", " second agent"))
    again = conversations.session_of(prompt("task", " second agent", " goes on"))
    assert first is not None and again not in (None, first) and second != first
    assert conversations.session_of(prompt("task", " first agent", " too")) == first
    third = conversations.session_of(prompt("task", " third agent"))
    assert third not in (first, second, again)


def test_a_conversation_that_is_held_once_more_has_the_name_of_the_first_time():
    conversations = Conversations()
    asked = [prompt("task", *[f" turn {turn}" for turn in range(turns)]) for turns in range(5)]
    first = [conversations.session_of(blocks) for blocks in asked]
    for _ in range(2):
        assert [conversations.session_of(blocks) for blocks in asked] == [first[-1]] * 5
    assert conversations.session_of([*asked[-1], b"more"]) == first[-1], "and goes on"
    assert conversations.session_of(asked[1]) == first[-1]
    assert conversations.session_of([*asked[-1], b"more", b"and more"]) == first[-1], "while it begins again"


def test_one_that_is_held_once_more_and_goes_another_way_is_another():
    conversations = Conversations()
    asked = [prompt("task", " first answer"), prompt("task", " first answer", " and then")]
    conversations.session_of(prompt("task"))
    first = {conversations.session_of(blocks) for blocks in asked}
    assert conversations.session_of(prompt("task")) in first
    second = conversations.session_of(prompt("task", " second answer"))
    assert second not in {None, *first}
    assert conversations.session_of(prompt("task", " second answer", " and then")) == second
    assert conversations.session_of(asked[1]) in first


def test_short_questions_behind_a_long_prompt_are_not_one_conversation():
    conversations = Conversations()
    names = [conversations.session_of([*prompt("system"), b"question %d" % number]) for number in range(40)]
    assert len(set(names) - {None}) <= 2 and names[-1] is None, "the second looks like a second turn"


def test_a_first_turn_counts_while_half_of_those_before_it_came_back():
    conversations = Conversations()
    for number in range(200):
        conversations.session_of(prompt(f"once {number} and never again"))
    assert conversations.session_of(prompt("new")) is None
    for number in range(200):
        conversations.session_of(prompt(f"agent {number}"))
        assert conversations.session_of(prompt(f"agent {number}", " goes on")) is not None
    assert conversations.session_of(prompt("newer")) is not None


class UnreadBlocks(list[bytes]):
    """Blocks of which only the first and the last two are read."""

    def __getitem__(self, at):
        assert at in (0, -1, slice(-2, None)), f"{at} was read"
        return super().__getitem__(at)

    def __reversed__(self):
        raise AssertionError("all were read")


def test_a_prompt_that_begins_like_none_before_is_not_searched():
    conversations = Conversations()
    conversations.session_of(prompt("one question"))
    assert conversations.session_of(UnreadBlocks(prompt("another question"))) is None


def test_a_prompt_without_a_full_block_is_no_conversation():
    assert Conversations().session_of([]) is None


steps = st.tuples(st.integers(0, 5), st.text("ab", min_size=1, max_size=6), st.none() | st.integers(0, 9))


@given(st.lists(steps, min_size=1, max_size=60))
def test_interleaved_conversations_with_beginnings_of_their_own_are_told_apart_whatever_is_asked_again(turns):
    conversations, names = Conversations(), {}
    asked: dict[int, list[str]] = {}
    for agent, text, repeated in turns:
        texts = asked.setdefault(agent, [])
        at = -1 if repeated is None or not texts else repeated % len(texts)
        if at == -1:
            texts.append((texts[-1] if texts else f"{agent}") + text)
        name = conversations.session_of(prompt(texts[at]))
        names.setdefault(agent, set()).add(name)
    for agent, found in names.items():
        assert len(found - {None}) <= 1, f"agent {agent} had several names"
    known = [name for found in names.values() for name in found - {None}]
    assert len(known) == len(set(known)), "two agents had one name"


@given(st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=80))
def test_whatever_is_asked_memory_is_bounded_and_a_name_is_a_hash(prompts):
    conversations = Conversations(ends_max=6)
    for text in prompts:
        name = conversations.session_of(prompt(text))
        assert name is None or name.session[:1] == b"\xff", "no client can give this name"
        assert len(conversations._ends) <= 6 and len(conversations._beginnings) <= 6
        assert {end[:1] for end in conversations._ends} <= conversations._beginnings.keys(), "an end is not found again"
