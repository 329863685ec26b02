"""The part of a file in the kernel's page cache: finding it, reading from it alone, and writing it through.

A read from the page cache is a copy from memory to memory. cachestat(2), Linux 6.5, tells beforehand whether it will be
one: a read of a page that is not there would start to read ahead from the disk, with RWF_NOWAIT too.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from spillway_connector.own_files import open_own, unlink_own
from spillway_connector.tiers.frame import PAGE_BYTES

_CACHESTAT = 451  # its number on every architecture
_WRITE_AND_WAIT = 1 | 2 | 4  # SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE, _WAIT_AFTER
_LIBC = ctypes.CDLL(None, use_errno=True)  # releases the GIL during a call
_SYNC_FILE_RANGE = getattr(_LIBC, "sync_file_range", None)
_CALLS = threading.local()  # a thread's structures for cachestat
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ESPIPE, errno.EAGAIN)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("size", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def is_cached(descriptor: int, offset: int, size: int) -> bool:
    """Whether all of a range lies in the page cache; it begins and ends on page boundaries. Does not wait.

    False if the kernel cannot tell: older than 6.5, or a file of another user that may only be read.
    """
    cached = _cached_pages(descriptor, offset, size)
    return cached is not None and cached * PAGE_BYTES >= size


def read_cached(descriptor: int, offset: int, views: Sequence[memoryview]) -> bool:
    """Fill ``views`` from the page cache; False, and they are undefined, if a page is missing.

    Does not wait for the disk. Call it right after :func:`is_cached` has returned True.
    """
    try:
        return os.preadv(descriptor, views, offset, os.RWF_NOWAIT) == sum(view.nbytes for view in views)
    except OSError:
        return False  # EAGAIN: a page has gone meanwhile. What else it is, a read that waits finds out


def write_through(descriptor: int, offset: int, size: int) -> None:
    """Write a range of the page cache to the disk and wait for it; the range stays cached. Raises OSError.

    As with a direct write, the disk may hold the bytes in a volatile cache of its own.
    """
    assert _SYNC_FILE_RANGE is not None
    arguments = ctypes.c_int(descriptor), ctypes.c_int64(offset), ctypes.c_int64(size)
    if _SYNC_FILE_RANGE(*arguments, ctypes.c_uint(_WRITE_AND_WAIT)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def supports_page_cache(directory: Path, depth: int = 1) -> bool:
    """Whether files in ``directory`` can be asked about, read without waiting, and written through: tried with one.

    depth: of that file, see own_files.py. Not with kernel pages of more than 4096 bytes, which frames would share.
    Raises OSError when no file can be written.
    """
    if _SYNC_FILE_RANGE is None or mmap.PAGESIZE != PAGE_BYTES:
        return False
    path = directory / f"probe-cache-{os.urandom(8).hex()}"
    descriptor = open_own(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, depth)
    try:
        os.pwrite(descriptor, bytes(PAGE_BYTES), 0)
        write_through(descriptor, 0, PAGE_BYTES)
        os.preadv(descriptor, [bytearray(PAGE_BYTES)], 0, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    else:
        return is_cached(descriptor, 0, PAGE_BYTES)
    finally:
        os.close(descriptor)
        unlink_own(path, depth, missing_ok=True)


def _cached_pages(descriptor: int, offset: int, size: int) -> int | None:
    try:
        area, counts, references = _CALLS.prepared
    except AttributeError:
        area, counts = _Range(), _Counts()
        references = ctypes.byref(area), ctypes.byref(counts)
        _CALLS.prepared = area, counts, references
    area.offset, area.size = offset, size
    if _LIBC.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_int(descriptor), *references, ctypes.c_uint(0)):
        return None
    return int(counts.cached)
