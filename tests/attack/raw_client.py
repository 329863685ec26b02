"""An attacker's requests: bytes on sockets, without a client library that would be too polite."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable

from .paced_stream import SECONDS_MAX


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=SECONDS_MAX)


def pour(port: int, parts: Iterable[bytes]) -> bytes:
    """Sends until all is sent or the other side closes; returns its reply, as far as the close let it through."""
    with connect(port) as sock:
        try:
            for part in parts:
                sock.sendall(part)
        except ConnectionError:
            pass
        return read_all(sock)


def read_all(sock: socket.socket) -> bytes:
    """Read to the end of the connection, whichever way it ends."""
    reply = b""
    try:
        while part := sock.recv(65536):
            reply += part
    except ConnectionError:
        pass
    return reply


def closed(sock: socket.socket) -> bool:
    """Whether the other side has closed. Reads its reply."""
    sock.setblocking(False)
    try:
        return sock.recv(65536) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def plain_request(content: str) -> bytes:
    body = b'{"model":"fake","messages":[{"role":"user","content":"%s"}]}' % content.encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def answer_time(port: int) -> float:
    """Seconds until a new connection's GET /health is answered with 200."""
    started = time.monotonic()
    with connect(port) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 200 ")
    return time.monotonic() - started
