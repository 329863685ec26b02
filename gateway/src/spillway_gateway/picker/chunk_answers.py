"""Answers to the chunks of a reply that a proxy keeps until they are answered (Envoy's mode STREAMED). Pure."""

from __future__ import annotations

from collections import deque

# None: the chunk goes to the client unchanged. Bytes: they go in its place.
Answer = bytes | None


class ChunkAnswers:
    """Gives one answer to each chunk, in order. Together the answers are the bytes that the client is to get.

    A chunk is answered once all of its bytes are to be passed on, so that the proxy has those that are not yet: if the
    picker dies, it passes them on itself and no byte is lost or comes twice. The last chunk is answered at the end, as
    nothing can follow it.

    Attributes:
        ended: the client gets no more bytes.
        kept_bytes: bytes of the chunks that are not answered yet.
    """

    def __init__(self) -> None:
        self._kept: deque[bytes] = deque()
        self._last_came = False
        self._passed = bytearray()  # to the client, but in no answer yet
        self.ended = False
        self.kept_bytes = 0

    def take(self, chunk: bytes, *, last: bool) -> list[Answer]:
        """Take the next chunk. Return the answers that are due: none before the end."""
        self._kept.append(chunk)
        self.kept_bytes += len(chunk)
        self._last_came = last
        return self._rest() if self.ended else []

    def is_kept(self, body: bytes) -> bool:
        """Whether no chunk is answered yet and all of them together are this body."""
        return len(body) == self.kept_bytes and body == b"".join(self._kept)

    def pass_on(self, body: bytes) -> list[Answer]:
        """Pass these bytes on to the client. Return the answers that are due."""
        self._passed += body
        answers: list[Answer] = []
        while len(self._kept) > self._last_came and self._passed.startswith(self._kept[0]):
            self._drop_unchanged()
            answers.append(None)
        if len(self._kept) > self._last_came and not self._kept[0].startswith(self._passed):
            answers.append(self._answer_changed())  # the proxy's bytes are not the client's any more
        return answers

    def end(self) -> list[Answer]:
        """End the reply. Return the answers that are due."""
        self.ended = True
        return self._rest() if self._kept else []

    @property
    def unanswerable(self) -> bytes:
        """The bytes that the client is to get although no chunk is there to carry them."""
        return b"" if self._kept else bytes(self._passed)

    def _rest(self) -> list[Answer]:
        answers: list[Answer] = []
        while self._kept and self._passed.startswith(self._kept[0]):
            if len(self._kept) == 1 and len(self._passed) > len(self._kept[0]):
                break  # the last one carries all that is left
            self._drop_unchanged()
            answers.append(None)
        while self._kept:
            answers.append(self._answer_changed())
        return answers

    def _drop_unchanged(self) -> None:
        chunk = self._kept.popleft()
        self.kept_bytes -= len(chunk)
        del self._passed[: len(chunk)]

    def _answer_changed(self) -> bytes:
        self.kept_bytes -= len(self._kept.popleft())
        body = bytes(self._passed)
        self._passed.clear()
        return body
