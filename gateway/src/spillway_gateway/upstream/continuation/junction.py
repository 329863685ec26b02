"""The token from which an answer can go on, and its text up to there. Pure.

An engine that continues sees tokens alone: it decodes none of those before the junction, and looks for stop strings in
what it adds. So the junction lies where the client's text is the text of whole tokens, and stop strings that begin
before it are looked for here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from spillway_gateway.upstream.continuation.sent_answer import SentAnswer

CONTEXT_TOKENS = 24  # decoded besides those that hold the withheld characters
_CHAR_TOKENS = 4  # of one character, at most: one for each byte
_DAMAGED_CHARS = 4  # at the start of a decoded piece: it may begin inside a character, or lose a leading blank
_PENDING_TOKENS_MAX = 3  # without text: a character has four bytes at most
_REPLACEMENT = "\ufffd"  # what incomplete characters decode to


class Junction(NamedTuple):
    """tokens: the answer's tokens that are kept. withheld: their text that the client does not have."""

    tokens: int
    withheld: str


class Piece(NamedTuple):
    """Tokens of the answer, from start to end, whose text an engine has to give."""

    start: int
    end: int


def held_back(stop: Sequence[str], include_stop: bool) -> int:
    """Characters of the text that vLLM holds back at all times, in case a stop string begins there."""
    return max(map(len, stop)) - 1 if stop and not include_stop else 0


def known_junction(sent: SentAnswer, withheld_chars: int) -> Junction | None:
    """The junction, if it is known without decoding; None if an engine has to be asked.

    A token that comes alone and with text completes all characters begun before it: vLLM's detokenizers hold text back
    until it ends with a whole character.
    """
    if not sent.texts:
        return Junction(0, "")
    last = sent.texts[-1]
    return Junction(last.end, "") if last.alone and not withheld_chars else None


def pieces(sent: SentAnswer, withheld_chars: int) -> Iterator[Piece]:
    """Yield the pieces to decode one after another until `joined` accepts one: the last tokens with text may hold the
    first bytes of a character."""
    last = sent.texts[-1].end
    start = max(0, last - CONTEXT_TOKENS - _CHAR_TOKENS * withheld_chars)
    for end in range(last, max(start, last - 1 - _PENDING_TOKENS_MAX), -1):
        yield Piece(start, end)


def joined(piece: Piece, text: str, sent_text: str, withheld_chars: int) -> Junction | None:
    """The junction at the end of a decoded piece; None if its text does not continue the client's, or ends inside a
    character. sent_text: SentAnswer.sent_text()."""
    if text.endswith(_REPLACEMENT) or len(text) < withheld_chars:
        return None
    at = len(text) - withheld_chars
    seen, withheld = text[:at], text[at:]
    if piece.start == 0:
        seen, sent_text = seen.lstrip(), sent_text.lstrip()
    else:
        seen = seen[_DAMAGED_CHARS:]
    compared = min(len(seen), len(sent_text))
    matches = seen[len(seen) - compared :] == sent_text[len(sent_text) - compared :] and (compared or not piece.start)
    return Junction(piece.end, withheld) if matches else None


class Stopped(NamedTuple):
    """text: the text to send. stop: the stop string that ends the answer here; None: none does."""

    text: str
    stop: str | None


class StopsAcross:
    """Finds stop strings that begin before a junction and end after it.

    before: the text before the junction, as far as a stop string may begin in it. If stop strings are not part of
    answers it is the withheld text, and is sent with what follows, once none can begin in it any more.
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool, before: str) -> None:
        self._stop = stop
        self._include = include_stop
        self._before = len(before)
        self._text = before
        self._sent = len(before) if include_stop else 0
        self._chars_max = max(map(len, stop), default=1) - 1  # after the junction, that such a stop string may take
        self.open = bool(before)

    def feed(self, text: str, *, finished: bool, stopped_by: str | None) -> Stopped:
        """text: the text that the engine adds. stopped_by: the stop string that the engine found, which `text` then
        lacks unless it is part of answers."""
        if not self.open:
            return Stopped(text, None)
        self._text += text
        seen = self._text + stopped_by if stopped_by is not None and not self._include else self._text
        crossing = self._first(seen)
        if crossing is not None and (stopped_by is None or self._precedes(crossing, stopped_by, len(seen))):
            at, stop = crossing
            self.open = False
            return Stopped(self._text[self._sent : at + len(stop) if self._include else at], stop)
        if finished or len(self._text) - self._before >= self._chars_max:
            self.open = False
        elif not self._include:
            return Stopped("", None)
        text, self._sent = self._text[self._sent :], len(self._text)
        return Stopped(text, None)

    def _first(self, seen: str) -> tuple[int, str] | None:
        """The stop string across the junction that ends first; of several, the first in the list, as
        vLLM decides."""
        found: tuple[int, str] | None = None
        for stop in self._stop:
            at = seen.find(stop, max(0, self._before - len(stop) + 1), self._before + len(stop) - 1)
            if 0 <= at < self._before and (found is None or at + len(stop) < found[0] + len(found[1])):
                found = at, stop
        return found

    def _precedes(self, crossing: tuple[int, str], stopped_by: str, end: int) -> bool:
        at, stop = crossing
        return at + len(stop) < end or self._stop.index(stop) <= self._stop.index(stopped_by)
