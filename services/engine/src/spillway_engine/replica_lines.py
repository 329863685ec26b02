"""The lines between the pods of a replica over several: each further pod's parent process holds a TCP connection to the
leader's. vLLM's leader watches the processes of its own pod alone, so without a line a lost rank lets requests wait
until Kubernetes has noticed the loss.

A further pod says once which one it is, until the leader accepts its line, and then a byte each second. It holds one
line in its life: its ranks cannot join a second time either. A line that ends before the leader does, or is silent,
means that the pod's ranks are lost. Its last byte says so if its engine failed: a request may be the cause then, and of
nothing else that ends a line. Whoever else connects is no pod, and means nothing. The port believes every peer that
claims to be a pod, like the port at which the ranks meet; a NetworkPolicy keeps others out.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

BEAT_SECONDS = 1.0
SILENT_SECONDS = 20.0  # a busy node delays a process; a lost one stays silent
STRANGERS_MAX = 16  # connections that have not said which pod they are
_HELLO = b"spillway pod "  # and the pod's index; no other protocol begins like that
_INDEX_BYTES = 2
_ACCEPTED = b"+"
_BEAT = b"."
_FAILED = b"!"


class LeaderLines:
    """The leader's side, as events of its selector.

    Args:
        port: to listen on.
        pods: how many further ones there are.
        selector: calls a key's data once its file is ready.
        on_lost: called with the index of a pod, what happened, and whether its engine failed.
    """

    def __init__(
        self, port: int, pods: int, selector: selectors.BaseSelector, on_lost: Callable[[int, str, bool], None]
    ) -> None:
        self._pods = pods
        self._selector = selector
        self._on_lost = on_lost
        self._lines: dict[socket.socket, int] = {}  # connection -> index of its pod; 0: not known yet
        self._silent_looks: dict[socket.socket, int] = {}
        self._listener = _listener(port)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def port(self) -> int:
        found: int = self._listener.getsockname()[1]
        return found

    def look(self) -> None:
        """End the lines that are silent; called once in BEAT_SECONDS, or later.

        It counts its calls, not the time, so a leader that was held up itself takes no pod for lost.
        """
        for line, looks in list(self._silent_looks.items()):
            self._silent_looks[line] = looks + 1
            if looks >= SILENT_SECONDS / BEAT_SECONDS:
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
        self._lines[line] = self._silent_looks[line] = 0
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
        self._silent_looks[line] = 0
        if not self._lines[line]:
            index = _index_in(data)
            if not 1 <= index <= self._pods or index in self._lines.values():
                self._end(line, "")
            else:
                self._lines[line] = index
                with suppress(OSError):  # it is gone again, which its end says
                    line.send(_ACCEPTED)
        elif _FAILED in data:
            self._end(line, "has lost its engine, which failed", failed=True)

    def _end(self, line: socket.socket, what: str, *, failed: bool = False) -> None:
        self._selector.unregister(line)
        line.close()
        del self._silent_looks[line]
        if index := self._lines.pop(line):
            self._on_lost(index, what, failed)


class FurtherLine:
    """A further pod's side, on a thread of its own: looking up the leader's name may take seconds.

    Args:
        leader: host and port of the leader's side.
        index: this pod's index.
    """

    def __init__(self, leader: tuple[str, int], index: int) -> None:
        self._leader = leader
        self._hello = _HELLO + index.to_bytes(_INDEX_BYTES, "big")
        self._ended = threading.Event()
        self._last_word = b""
        self._thread = threading.Thread(target=self._hold, name="line to the leader", daemon=True)
        self._thread.start()

    def close(self, *, failed: bool) -> None:
        """failed: whether the pod's engine ended unasked."""
        self._last_word = _FAILED if failed else b""
        self._ended.set()
        self._thread.join(BEAT_SECONDS)  # longer only while it looks the leader up, to which it has no line then

    def _hold(self) -> None:
        while not self._ended.is_set():
            with suppress(OSError), socket.create_connection(self._leader, SILENT_SECONDS) as line:
                line.settimeout(None)  # a leader that is held up reads a line later, and would take its end for a loss
                line.sendall(self._hello)
                if line.recv(1) == _ACCEPTED:
                    self._beat(line)
                    return
            self._ended.wait(BEAT_SECONDS)  # the leader has not started yet, or strangers hold its lines

    def _beat(self, line: socket.socket) -> None:
        with suppress(OSError):  # the leader has ended
            while not self._ended.wait(BEAT_SECONDS):
                line.sendall(_BEAT)
            line.sendall(self._last_word)


def _index_in(data: bytes) -> int:
    """Read the index that a pod's greeting names; 0 if these bytes are no greeting of a pod."""
    if len(data) != len(_HELLO) + _INDEX_BYTES or not data.startswith(_HELLO):
        return 0
    return int.from_bytes(data[len(_HELLO) :], "big")


def _listener(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
