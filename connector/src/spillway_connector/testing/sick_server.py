"""A TCP server on loopback that misbehaves in one named way: what a client meets when a store is sick, not down."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from types import TracebackType


class SickServer:
    """Accepts connections and answers every command it receives with the next of ``answers`` (the last one repeats).

    An answer is a list of pieces sent one after the other; None among them closes the connection at that point. An
    empty list is silence. ``later_answers`` are for all connections but the first. Commands are not parsed: one receive
    is taken for one command. After ``commands_max`` of them a connection stays open but is not read any more.
    """

    def __init__(
        self,
        answers: Iterable[list[bytes | None]],
        *,
        later_answers: Iterable[list[bytes | None]] | None = None,
        commands_max: int | None = None,
    ) -> None:
        self._first_answers = list(answers)
        self._later_answers = self._first_answers if later_answers is None else list(later_answers)
        self._commands_max = commands_max
        self._answer: Callable[[bytes], list[bytes | None]] | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._stop = threading.Event()
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self.port: int = self._listener.getsockname()[1]
        self.commands: list[bytes] = []
        self.received = threading.Event()  # set at every command
        self.accepted = 0

    def answer_by(self, answer: Callable[[bytes], list[bytes | None]]) -> None:
        """From now on answer every command by what ``answer`` makes of it."""
        self._answer = answer

    def send_to_all(self, piece: bytes) -> None:
        """Send something to every connection, asked or not. Raises OSError where one is gone."""
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

    def _serve(self, connection: socket.socket, answers: list[list[bytes | None]]) -> None:
        step = 0
        try:
            while command := connection.recv(65536):
                self.commands.append(command)
                self.received.set()
                answer = self._answer(command) if self._answer else answers[min(step, len(answers) - 1)]
                step += 1
                for piece in answer:
                    if piece is None:
                        connection.close()
                        return
                    connection.sendall(piece)
                if step == self._commands_max:
                    self._stop.wait()
        except OSError:
            return
