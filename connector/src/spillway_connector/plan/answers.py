"""Whether clients send answers back as they were, so that the KV of generated tokens is worth keeping.

The chat template of a model that thinks may leave the thinking of earlier turns out. Then the next prompt goes on with
other tokens, and no KV of the answer is used again. This is measured: the first chunk behind the prompt of each answer
that fills a chunk is remembered, and a later prompt that holds that chunk has sent the answer back.

- An answer counts when it is sent back, when its session goes on without it, or when ANSWERS_MAX newer ones were given.
  An answer that is sent back after its session went on otherwise (after a request of a sub-agent, for example) counts
  as sent back.
- If less than SENT_BACK_SHARE_MIN of the answers are sent back, they are not kept until SENT_BACK_SHARE_AGAIN is
  reached again. The first COUNTED_MIN answers are always kept.

A chunk's key covers all tokens before it, the tenant's salt and the adapter, so no answer is taken for another.

Pure. Everything here belongs to one thread, the scheduler's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

ANSWERS_MAX = 256  # remembered
COUNTED_MIN = 32
COUNTED_MAX = 256  # then older ones count half
SENT_BACK_SHARE_MIN = 0.3  # what keeping an answer costs decoding is won back from three in ten on (docs/benchmarks.md)
SENT_BACK_SHARE_AGAIN = 0.4


@dataclass(slots=True, eq=False)
class _Answer:
    session: Hashable | None
    counted: bool = False
    sent_back: bool = False


class AnswerReuse:
    """The answers of one engine. keeps: whether the KV of answers is worth keeping. counted: answers that decide so."""

    def __init__(self) -> None:
        self.keeps = True
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()  # by chunk, the oldest first
        self._newest: dict[Hashable, bytes] = {}  # by session
        self.counted = 0
        self._sent_back = 0

    @property
    def sent_back_share(self) -> float | None:
        """The share of the counted answers that were sent back; None until COUNTED_MIN have been counted."""
        return self._sent_back / self.counted if self.counted >= COUNTED_MIN else None

    def requested(self, keys: Sequence[bytes], session: Hashable | None) -> None:
        """A new request's prompt has these chunks."""
        if self._answers and not self._answers.keys().isdisjoint(keys):  # most prompts continue no answer
            for key in keys:
                answer = self._answers.get(key)
                if answer is not None and not answer.sent_back:
                    answer.sent_back = True
                    self._count(answer)
                    self._sent_back = min(self._sent_back + 1, self.counted)
        elif session not in self._newest:
            return
        newest = self._newest.pop(session, None) if session is not None else None
        if newest is not None:
            self._count(self._answers[newest])
        self._decide()

    def answered(self, key: bytes, session: Hashable | None) -> None:
        """An answer has ended whose first chunk behind the prompt is this one."""
        self._forget(key)
        self._answers[key] = _Answer(session)
        if session is not None:
            self._newest[session] = key
        if len(self._answers) > ANSWERS_MAX:
            self._forget(next(iter(self._answers)))
        self._decide()

    def _forget(self, key: bytes) -> None:
        answer = self._answers.pop(key, None)
        if answer is None:
            return
        self._count(answer)
        if self._newest.get(answer.session) == key:
            del self._newest[answer.session]

    def _count(self, answer: _Answer) -> None:
        if answer.counted:
            return
        answer.counted = True
        self.counted += 1
        if self.counted >= COUNTED_MAX:
            self.counted //= 2
            self._sent_back //= 2

    def _decide(self) -> None:
        share = self.sent_back_share
        if share is not None:
            self.keeps = share >= (SENT_BACK_SHARE_MIN if self.keeps else SENT_BACK_SHARE_AGAIN)
