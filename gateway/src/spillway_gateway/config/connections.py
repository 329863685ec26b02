"""Bounds of the connections that clients open, and of what they send before they are authenticated."""

from __future__ import annotations

from spillway_gateway.config.typed_settings import CamelSection, Count, Positive


class ConnectionsConfig(CamelSection, frozen=True):
    """Per gateway process, and enforced before any key is looked at. See client/bounded_connection.py."""

    open_max: Count = 8192  # of clients; fewer where `ulimit -n` allows fewer
    per_address_max: Count = 6144  # of open_max; behind a proxy all clients may have one address
    head_bytes_max: Count = 64 * 1024  # request line and headers
    target_bytes_max: Count = 8 * 1024  # path and query
    headers_max: Count = 128
    head_seconds: Positive = 15.0  # from the accept, or from the first byte of a later request, to a whole head
    idle_seconds: Positive = 75.0  # between two requests; longer than usual load balancers keep theirs
    stalled_seconds: Positive = 60.0  # for which a client takes none of the bytes that wait for it
    body_bytes_per_second_min: Count = 64 * 1024  # of a body, over each timeouts.bodyReadSeconds
