"""The rendezvous of a replica's pods, as in vLLM. The leader serves once all ranks have joined. After that no rank can
join, and the leader does not notice the loss of one."""

from __future__ import annotations

import contextlib
import socket
import time

LOOK_SECONDS = 0.5


def await_further_pods(port: int, count: int) -> list[socket.socket]:
    """Wait for the further pods, as the leader does before it serves. Keep the returned connections open."""
    with socket.create_server(("", port)) as meeting:
        return [meeting.accept()[0] for _ in range(count)]


def meet_leader(host: str, port: int) -> socket.socket:
    """Connect to the leader, as a further pod does, however long that takes. Asked to stop, the pod ends at once."""
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection((host, port), LOOK_SECONDS)
        time.sleep(LOOK_SECONDS)
