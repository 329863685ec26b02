"""Memory that a tier reads into and writes from.

Page aligned, which direct I/O needs, and on huge pages where the kernel has them. A block layer request is a list of
contiguous pieces of memory, and drivers bound how many (virtio: 254). Of 4 KiB pages, which lie anywhere, 3 MiB makes
768 pieces and so several requests; of huge pages three pieces and one request. Measured: see docs/benchmarks.md.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

HUGE_PAGE_BYTES = 2 << 20


def transfer_buffer(size: int) -> memoryview:
    """``size`` bytes of private memory, flat and writable, all pages already there.

    A size that is not a multiple of 2 MiB may take up to that much more. Where the kernel has no huge pages to give
    (none configured, or memory too fragmented) it is ordinary memory.
    """
    whole_bytes = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    # One more than needed, so that huge pages fit in wherever the kernel puts it; what is not touched costs nothing.
    mapped = mmap.mmap(-1, whole_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel built without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE_BYTES
    memory[start : start + size] = 0  # fault the pages in now, not during the first transfer
    return memoryview(mapped)[start : start + size]
