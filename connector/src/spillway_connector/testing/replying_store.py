"""An object store that replies what a test wants: throttling, half objects, refusals by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[["StoreRequest"], None]


class StoreRequest(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ReplyingStore

    def _any(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, self.path))
        document = self.server.document
        if document is not None and self.path.endswith("/document"):
            self.reply(200, document)
        else:
            self.server.answer(self)

    do_GET = do_HEAD = do_PUT = do_DELETE = _any

    def reply(self, status: int, body: bytes = b"", *, announced: int | None = None) -> None:
        """announced: the length that the reply's header names, if it is another than the body's."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if announced is None else announced))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Sat, 28 Nov 2026 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        if announced is not None:
            self.close_connection = True

    def refuse(self, status: int, code: str) -> None:
        self.reply(status, f"<Error><Code>{code}</Code><Message>said by a test</Message></Error>".encode())

    def log_message(self, *_: Any) -> None:
        pass


class ReplyingStore(ThreadingHTTPServer):
    """document: the namespace's, which is there; None: a request for it is answered like any other. answer: what is
    replied to any other request."""

    daemon_threads = True

    def __init__(self, document: bytes) -> None:
        super().__init__(("127.0.0.1", 0), StoreRequest)
        self.document: bytes | None = document
        self.asked: list[tuple[str, str]] = []
        self.answer: Answer = lambda request: request.refuse(404, "NoSuchKey")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def asked_for(self, command: str) -> int:
        return sum(each == command and not path.endswith("/document") for each, path in self.asked)


@contextmanager
def replying_store(document: bytes) -> Iterator[ReplyingStore]:
    """A store on a free port of this machine, which ends with the block."""
    server = ReplyingStore(document)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
