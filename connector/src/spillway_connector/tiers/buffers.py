"""Memory that a tier reads into and writes from.

The memory is page aligned, which direct I/O needs, and on huge pages if the kernel has them. A block layer request is a
list of physically contiguous segments, and drivers bound their number (virtio: 254). With 4 KiB pages 3 MiB are 768
segments and so several requests; with huge pages three segments and one request. docs/benchmarks.md has figures.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

HUGE_PAGE_BYTES = 2 << 20


def transfer_buffer(size: int) -> memoryview:
    """Return ``size`` bytes of private memory, flat and writable, with all pages allocated.

    A size that is not a multiple of 2 MiB may take up to that much more. If the kernel has no huge pages to give
    (none configured, or memory too fragmented), the buffer is ordinary memory.
    """
    whole_bytes = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    # One more than needed, so that the memory can begin on a huge page; pages that are not touched cost nothing.
    mapped = mmap.mmap(-1, whole_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel built without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE_BYTES
    memory[start : start + size] = 0  # take the page faults now, not during the first transfer
    return memoryview(mapped)[start : start + size]
