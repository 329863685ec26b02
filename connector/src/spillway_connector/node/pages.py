"""Taking the memory of a node's rows: once, by several threads, and from the memory nodes in turn.

A page lies on the memory node of the thread that touches it first, and counts as memory of that thread's pod. A thread
binds itself to the cores of a memory node, because a container may not choose the memory policy (set_mempolicy).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence

from spillway_connector.device.host_region import HostRegion
from spillway_connector.device.memory_nodes import cores_of_memory_nodes
from spillway_connector.errors import HostMemoryError

_PIECE_BYTES = 64 << 20
_THREADS_MAX = 8  # of all memory nodes
_JOIN_SECONDS = 0.2  # between two looks at signals


def take_pages(region: HostRegion, nodes: Sequence[frozenset[int]] | None = None) -> None:
    """Take all memory of the region. Raises HostMemoryError.

    nodes: the cores of each memory node; None: of those of this machine.
    """
    nodes = cores_of_memory_nodes() if nodes is None else nodes
    parts = max(1, len(nodes))
    pieces = [deque(range(part * _PIECE_BYTES, region.size_bytes, parts * _PIECE_BYTES)) for part in range(parts)]
    failures: list[OSError] = []
    refused = threading.Event()  # by a kernel that cannot be asked for pages

    def take(left: deque[int], cores: frozenset[int] | None) -> None:
        try:
            if cores is not None:
                os.sched_setaffinity(0, cores)  # of this thread
            while left and not failures and not refused.is_set():
                try:
                    start = left.popleft()
                except IndexError:
                    return
                if not region.populate(start, min(_PIECE_BYTES, region.size_bytes - start)):
                    refused.set()
        except OSError as error:
            failures.append(error)

    threads = []
    for part in range(parts):
        cores = nodes[part] if len(nodes) > 1 else None
        count = min(len(nodes[part]) if nodes else os.cpu_count() or 1, max(1, _THREADS_MAX // parts))
        threads += [
            threading.Thread(target=take, args=(pieces[part], cores), name="spillway-pages", daemon=True)
            for _ in range(count)
        ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(_JOIN_SECONDS)
    if failures:
        raise HostMemoryError(
            f"{region.path} got {region.taken_bytes} of its {region.size_bytes} bytes of memory "
            f"({failures[0].strerror}); lower the node tier's bytes, or make room on this machine"
        ) from failures[0]
    if refused.is_set():
        region.claim(0, region.row_bytes)
