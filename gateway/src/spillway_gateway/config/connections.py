"""Bounds of the connections that clients open, and of what they send before anybody knows who they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConnectionsConfig:
    """Per gateway process, and enforced before any key is looked at. See client_bounds.py."""

    open_max: int = 8192  # of clients; fewer where `ulimit -n` allows fewer
    per_address_max: int = 6144  # of open_max; behind a proxy all clients may have one address
    head_bytes_max: int = 64 * 1024  # request line and headers
    target_bytes_max: int = 8 * 1024  # path and query
    headers_max: int = 128
    head_seconds: float = 15.0  # from the accept, or from the first byte of a later request, to a whole head
    idle_seconds: float = 75.0  # between two requests; longer than usual load balancers keep theirs
    stalled_seconds: float = 60.0  # for which a client takes none of the bytes that wait for it
    body_bytes_per_second_min: int = 64 * 1024  # of a body, over each timeouts.bodyReadSeconds
