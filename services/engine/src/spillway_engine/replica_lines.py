"""The lines between the pods of a replica over several: each further pod's parent process holds a TCP connection to the
leader's. vLLM's leader watches the processes of its own pod alone, so without a line a lost rank lets requests wait
until Kubernetes has noticed the loss.

A further pod says once which one it is, and then a byte each second. It holds one line in its life: its ranks cannot
join a second time either. A line that ends before the leader does, or is silent, means that the pod's ranks are lost.
Whoever else connects is no pod, and means nothing. Neither side trusts more of the other than that.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable

BEAT_SECONDS = 1.0
SILENT_SECONDS = 20.0  # a busy node delays a process; a lost one stays silent
HELLO_BYTES = 2  # the index of the pod
STRANGERS_MAX = 16  # connections that have not said which pod they are


class LeaderLines:
    """The leader's side, as events of its selector.

    Args:
        port: to listen on.
        pods: how many further ones there are.
        selector: calls a key's data once its file is ready.
        on_lost: called with the index of a pod and what happened.
    """

    def __init__(
        self, port: int, pods: int, selector: selectors.BaseSelector, on_lost: Callable[[int, str], None]
    ) -> None:
        self._pods = pods
        self._selector = selector
        self._on_lost = on_lost
        self._lines: dict[socket.socket, int] = {}  # connection -> index of its pod; 0: not known yet
        self._heard_at: dict[socket.socket, float] = {}
        self._listener = _listener(port)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def port(self) -> int:
        found: int = self._listener.getsockname()[1]
        return found

    def look(self) -> None:
        """Called each second: ends the lines that are silent."""
        now = time.monotonic()
        for line, heard_at in list(self._heard_at.items()):
            if now - heard_at > SILENT_SECONDS:
                self._end(line, f"said nothing for {SILENT_SECONDS:g} s")

    def close(self) -> None:
        for each in (self._listener, *self._lines):
            self._selector.unregister(each)
            each.close()
        self._lines.clear()

    def _accept(self) -> None:
        try:
            line, _ = self._listener.accept()
        except OSError:  # it left again
            return
        if list(self._lines.values()).count(0) >= STRANGERS_MAX:
            line.close()
            return
        line.setblocking(False)
        self._lines[line], self._heard_at[line] = 0, time.monotonic()
        self._selector.register(line, selectors.EVENT_READ, lambda: self._hear(line))

    def _hear(self, line: socket.socket) -> None:
        try:
            data = line.recv(64)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(line, f"is gone ({error.strerror})")
            return
        if not data:
            self._end(line, "is gone")
            return
        self._heard_at[line] = time.monotonic()
        if not self._lines[line]:
            index = int.from_bytes(data[:HELLO_BYTES], "big")
            if len(data) < HELLO_BYTES or not 1 <= index <= self._pods or index in self._lines.values():
                self._end(line, "")
            else:
                self._lines[line] = index

    def _end(self, line: socket.socket, what: str) -> None:
        self._selector.unregister(line)
        line.close()
        del self._heard_at[line]
        if index := self._lines.pop(line):
            self._on_lost(index, what)


class FurtherLine:
    """A further pod's side, on a thread of its own: looking up the leader's name may take seconds.

    Args:
        leader: host and port of the leader's side.
        index: of this pod.
    """

    def __init__(self, leader: tuple[str, int], index: int) -> None:
        self._leader = leader
        self._hello = index.to_bytes(HELLO_BYTES, "big")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._hold, name="line to the leader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()

    def _hold(self) -> None:
        while not self._ended.is_set():
            try:
                line = socket.create_connection(self._leader, SILENT_SECONDS)
            except OSError:  # it has not started yet
                self._ended.wait(BEAT_SECONDS)
                continue
            with line:
                try:
                    line.sendall(self._hello)
                    while not self._ended.wait(BEAT_SECONDS):
                        line.sendall(b".")
                except OSError:
                    return  # the leader has ended


def _listener(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
