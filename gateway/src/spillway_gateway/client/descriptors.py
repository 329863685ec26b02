"""File descriptors: the shares of clients and engines, so that probes and files always get one."""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass

# Probes and scrapes (ops/server.py), polls and KV events of engines, files, the event loops' own.
RESERVED = 96
PER_ENGINE = 4
SHARE_MIN = 8
UNLIMITED = 2**31


@dataclass(frozen=True, slots=True)
class DescriptorShares:
    """Numbers of connections that clients and requests to engines may have open."""

    clients: int
    upstream: int


def shares(descriptors: int, clients_max: int, upstream_max: int, engines: int) -> DescriptorShares:
    """Pure. descriptors: RLIMIT_NOFILE. If they are too few for both, each side gets half of what is not reserved,
    since a request takes one on either side."""
    free = max(descriptors - RESERVED - PER_ENGINE * engines, 2 * SHARE_MIN)
    if clients_max + upstream_max <= free:
        return DescriptorShares(clients_max, upstream_max)
    clients = min(clients_max, max(free // 2, free - upstream_max))
    return DescriptorShares(clients, min(upstream_max, free - clients))


def raise_limit() -> None:
    """Raise the soft limit to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the present limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit() -> int:
    """The soft limit of open files; UNLIMITED if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else UNLIMITED
