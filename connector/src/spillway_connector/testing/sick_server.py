"""A TCP server on loopback that misbehaves in one named way: what a client meets when a store is sick, not down."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from types import TracebackType

RECEIVE_BYTES = 65536


class Gesture(Enum):
    """An act of a server on a connection other than sending."""

    HALF_CLOSE = "no more will be sent, but what comes is still read"


Piece = bytes | Gesture | None


class SickServer:
    """Accepts connections and answers every command it receives with the next of ``answers`` (the last one repeats).

    An answer is a list of pieces sent one after the other; None among them closes the connection at that point. An
    empty list is silence. ``later_answers`` are for all connections but the first. Commands are not parsed: one receive
    is taken for one command. After ``commands_max`` of them a connection stays open but is not read any more.
    ``before_each_receive`` is called ahead of each receive, ``trickle`` after each byte of an answer, which then goes
    out byte by byte: with a stepped clock they make a server as slow as one likes in no time.
    """

    def __init__(
        self,
        answers: Iterable[Sequence[Piece]],
        *,
        later_answers: Iterable[Sequence[Piece]] | None = None,
        commands_max: int | None = None,
        before_each_receive: Callable[[], None] | None = None,
        trickle: Callable[[], None] | None = None,
    ) -> None:
        self._first_answers = list(answers)
        self._later_answers = self._first_answers if later_answers is None else list(later_answers)
        self._commands_max = commands_max
        self._before_each_receive = before_each_receive
        self._trickle = trickle
        self._answer: Callable[[bytes], Sequence[Piece]] | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._stop = threading.Event()
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self.port: int = self._listener.getsockname()[1]
        self.commands: list[bytes] = []
        self.received = threading.Event()  # set at every command
        self.ended = threading.Event()  # set once a client has closed a connection and all it sent was received
        self.accepted = 0

    def answer_by(self, answer: Callable[[bytes], Sequence[Piece]]) -> None:
        """Answer every command from now on by what ``answer`` makes of it."""
        self._answer = answer

    def send_to_all(self, piece: bytes) -> None:
        """Send something to every connection, asked or not. Raises OSError if one is gone."""
        for connection in list(self._connections):
            connection.sendall(piece)

    def __enter__(self) -> SickServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for open_socket in (self._listener, *self._connections):
            try:
                open_socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            open_socket.close()
        self._thread.join(timeout=5.0)

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            answers = self._later_answers if self.accepted else self._first_answers
            self.accepted += 1
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection, answers), daemon=True).start()

    def _serve(self, connection: socket.socket, answers: list[Sequence[Piece]]) -> None:
        step = 0
        try:
            while command := self._receive(connection):
                self.commands.append(command)
                self.received.set()
                answer = self._answer(command) if self._answer else answers[min(step, len(answers) - 1)]
                step += 1
                for piece in answer:
                    if piece is None:
                        connection.close()
                        return
                    self._send(connection, piece)
                if step == self._commands_max:
                    self._stop.wait()
            self.ended.set()
        except OSError:
            return

    def _receive(self, connection: socket.socket) -> bytes:
        if self._before_each_receive is not None:
            self._before_each_receive()
        return connection.recv(RECEIVE_BYTES)

    def _send(self, connection: socket.socket, piece: bytes | Gesture) -> None:
        if isinstance(piece, Gesture):
            connection.shutdown(socket.SHUT_WR)
        elif self._trickle is None:
            connection.sendall(piece)
        else:
            for position in range(len(piece)):
                connection.sendall(piece[position : position + 1])
                self._trickle()
