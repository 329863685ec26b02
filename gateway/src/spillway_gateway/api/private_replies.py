"""Removes from a reply what its tenant must not learn: the engines' transfer parameters, and the gateway's own time,
which reveals texts that the gateway has read before.

vLLM answers a request with `kv_transfer_params` that name its host, port and block numbers, at the top level of a plain
reply or within the last event of a Responses stream. Each value becomes `null`, filled with blanks to the length that
it had: so the reply's content-length holds, and nothing is held back but the few bytes that may begin such a name.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from enum import Enum, auto
from typing import Any

from spillway_gateway.client.connection import ClientRequest
from spillway_gateway.upstream.forward import Headers
from spillway_settings.wire import OVERHEAD_HEADER

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

_KEYS = (b'"kv_transfer_params"', b'"ec_transfer_params"')
_keys = re.compile(b"|".join(_KEYS)).finditer
_blanks = re.compile(rb"[ \t\r\n]*+").match
_NULL = b"null"
_TIME = OVERHEAD_HEADER.encode()


class _At(Enum):
    """The kind of what follows."""

    ANYTHING = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()


class TransferParamsFilter:
    """Filters one reply."""

    def __init__(self) -> None:
        self._at = _At.ANYTHING
        self._held = b""  # may begin a name, or is the beginning of a value
        self._before = b""  # the last byte that was passed on
        self._depth = 0
        self._text = False  # within a string of the value
        self._escaped = False
        self._blanked = 0  # bytes of the value so far

    def feed(self, part: bytes, *, last: bool) -> bytes:
        """Return the part of the reply that can be passed on by now."""
        if self._at is _At.ANYTHING and not self._held and b"_transfer_params" not in part and not _ends_open(part):
            self._before = part[-1:] or self._before
            return part
        data, self._held = self._held + part, b""
        passed: list[bytes] = []
        at = 0
        while at < len(data):
            if self._at is _At.ANYTHING:
                at = self._pass_to_key(data, at, passed, last=last)
            elif self._at in (_At.COLON, _At.VALUE):
                at = self._pass_to_value(data, at, passed)
            else:
                at = self._blank(data, at, passed)
        if last and self._held:
            passed.append(self._held)
            self._held = b""
        result = b"".join(passed)
        self._before = result[-1:] or self._before
        return result

    def _pass_to_key(self, data: bytes, at: int, passed: list[bytes], *, last: bool) -> int:
        for found in _keys(data, at):
            before = data[found.start() - 1 : found.start()] if found.start() else self._before
            if before != b"\\":  # within a text its quotes would be escaped
                passed.append(data[at : found.end()])
                self._at = _At.COLON
                return found.end()
        end = len(data) if last else len(data) - _open_bytes(data[at:])
        passed.append(data[at:end])
        self._held = data[end:]
        return len(data)

    def _pass_to_value(self, data: bytes, at: int, passed: list[bytes]) -> int:
        end = _blanks(data, at).end()  # type: ignore[union-attr]
        passed.append(data[at:end])
        if end == len(data):
            return end
        if self._at is _At.COLON:
            self._at = _At.VALUE if data[end : end + 1] == b":" else _At.ANYTHING
            if self._at is _At.VALUE:
                passed.append(b":")
                return end + 1
            return end
        self._at = _At.IN_VALUE
        self._depth, self._text, self._escaped, self._blanked = 0, False, False, 0
        return end

    def _blank(self, data: bytes, at: int, passed: list[bytes]) -> int:
        """Blank a value up to its end or the end of the data."""
        begin = at
        done = False
        while at < len(data) and not done:
            byte = data[at]
            if self._text:
                if self._escaped:
                    self._escaped = False
                elif byte == 0x5C:
                    self._escaped = True
                elif byte == 0x22:
                    self._text = False
                    done = self._depth == 0
            elif byte == 0x22:
                self._text = True
            elif byte in b"{[":
                self._depth += 1
            elif byte in b"}]" and self._depth:
                self._depth -= 1
                done = self._depth == 0
            elif self._depth == 0 and byte in b",}] \t\r\n":
                at -= 1  # the byte behind a number or a word
                done = True
            at += 1
        value = self._held + data[begin:at]
        self._held = b""
        if self._blanked:
            passed.append(b" " * (at - begin))
        elif len(value) >= len(_NULL):
            passed.append(_NULL.ljust(len(value)))
            self._blanked = len(value)
        elif done:
            passed.append(value)  # too short to say anything: {} or []
        else:  # read once more from its beginning when more of it has come
            self._held = value
            self._depth, self._text, self._escaped = 0, False, False
        if done:
            self._at = _At.ANYTHING
        return at


def _ends_open(part: bytes) -> bool:
    return b'"' in part[-len(_KEYS[0]) :] and _open_bytes(part) > 0


def _open_bytes(part: bytes) -> int:
    """Return how many of the last bytes may begin a name."""
    tail = part[-len(_KEYS[0]) + 1 :]
    at = tail.find(b'"')
    while at >= 0:
        if any(key.startswith(tail[at:]) for key in _KEYS):
            return len(tail) - at
        at = tail.find(b'"', at + 1)
    return 0


def _without_time(headers: Headers) -> Headers:
    return [pair for pair in headers if pair[0] != _TIME]


class PrivateReply:
    """The client's side of a request whose reply is filtered."""

    def __init__(self, client: ClientRequest, send: Send) -> None:
        self._client = client
        self._send = send
        self._filter = TransferParamsFilter()
        self.set_disconnect_callback = client.set_disconnect_callback
        self.clear_disconnect_callback = client.clear_disconnect_callback
        self.end_with_reply = client.end_with_reply
        self.take_reply_bytes = client.take_reply_bytes
        self.give_reply_bytes = client.give_reply_bytes
        self.engine_connections = client.engine_connections

    @property
    def writable(self) -> bool:
        return self._client.writable

    def reply(self, status: int, headers: Headers, body: bytes) -> bool:
        return self._client.reply(status, _without_time(headers), TransferParamsFilter().feed(body, last=True))

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            more = bool(message.get("more_body", False))
            body = self._filter.feed(message.get("body", b""), last=not more)
            if more and not body:
                return
            message = {**message, "body": body}
        elif message["type"] == "http.response.start":
            message = {**message, "headers": _without_time(message["headers"])}
        await self._send(message)
