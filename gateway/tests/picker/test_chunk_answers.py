"""Answers to chunks that a proxy keeps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.picker.chunk_answers import Answer, ChunkAnswers

CHUNKS = st.lists(st.binary(max_size=4), min_size=1, max_size=8)


class Proxy:
    """Keeps chunks until they are answered. client: what has reached it."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []
        self.client = b""

    def take(self, answers: list[Answer]) -> None:
        for answer in answers:
            chunk = self.kept.pop(0)
            self.client += chunk if answer is None else answer


@given(st.data())
def test_a_reply_that_is_passed_on_as_it_came_is_whole_if_the_picker_dies_at_any_point(data: st.DataObject) -> None:
    """The bytes that have reached the client and those that the proxy keeps make up the reply at every moment."""
    chunks = data.draw(CHUNKS)
    answers, proxy, passed, came = ChunkAnswers(), Proxy(), 0, b""
    for at, chunk in enumerate(chunks):
        came += chunk
        proxy.kept.append(chunk)
        proxy.take(answers.take(chunk, last=at == len(chunks) - 1))
        until = data.draw(st.integers(passed, len(came)))
        proxy.take(answers.pass_on(came[passed:until]))
        passed = until
        assert proxy.client + b"".join(proxy.kept) == came
        assert proxy.client == came[: len(proxy.client)] and len(proxy.client) <= passed
        assert answers.kept_bytes == sum(map(len, proxy.kept))
    proxy.take(answers.pass_on(came[passed:]))
    proxy.take(answers.end())
    assert (proxy.client, proxy.kept, answers.unanswerable) == (came, [], b"")


@given(CHUNKS, st.lists(st.binary(max_size=4), max_size=8))
def test_the_client_gets_what_is_passed_on_whatever_came(chunks: list[bytes], passed: list[bytes]) -> None:
    answers, proxy = ChunkAnswers(), Proxy()
    for at, chunk in enumerate(chunks):
        proxy.kept.append(chunk)
        proxy.take(answers.take(chunk, last=at == len(chunks) - 1))
        if at < len(passed):
            proxy.take(answers.pass_on(passed[at]))
    for body in passed[len(chunks) :]:
        proxy.take(answers.pass_on(body))
    proxy.take(answers.end())
    assert (proxy.client, proxy.kept, answers.unanswerable) == (b"".join(passed), [], b"")


def test_a_chunk_is_passed_on_as_soon_as_all_of_it_is() -> None:
    answers = ChunkAnswers()
    assert answers.take(b"one", last=False) == []
    assert answers.pass_on(b"on") == []
    assert answers.pass_on(b"e") == [None]
    assert answers.take(b"last", last=True) == []
    assert answers.pass_on(b"last") == [], "an error may follow"
    assert answers.pass_on(b"error") == []
    assert answers.end() == [b"lasterror"]


def test_what_ends_a_reply_before_its_last_chunk_goes_with_the_next_one_or_cannot_go() -> None:
    answers = ChunkAnswers()
    answers.take(b"one", last=False)
    assert answers.pass_on(b"one") == [None]
    assert answers.pass_on(b"error") == [] and answers.end() == []
    assert answers.unanswerable == b"error"
    assert answers.take(b"two", last=False) == [b"error"] and answers.unanswerable == b""
    assert answers.take(b"three", last=True) == [b""]


def test_a_whole_reply_is_known_from_one_in_its_place() -> None:
    answers = ChunkAnswers()
    assert answers.is_kept(b"") and not answers.is_kept(b"x")
    answers.take(b"one", last=False)
    answers.take(b"two", last=True)
    assert answers.is_kept(b"onetwo") and not answers.is_kept(b"twoone")
    assert answers.pass_on(b"onetwo") + answers.end() == [None, None]
