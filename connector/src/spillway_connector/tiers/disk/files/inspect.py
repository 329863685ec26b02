"""An operator's view of a directory with one file per frame, while engines use it.

Walking opens files for reading and leaves their age alone. Removing goes through the ledger's lock like an engine's own
evictions do, so the bytes in use stay right for all of them.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import xxhash

from spillway_connector.errors import CorruptReason, TierCorrupt
from spillway_connector.tiers.disk.files.ledger import Balance, Ledger
from spillway_connector.tiers.disk.files.space import FRAME_SUFFIX, LEDGER_NAME, PARTIAL_NAME, UNLINKS_PER_LOCK
from spillway_connector.tiers.disk.io import tier_error
from spillway_connector.tiers.disk.root import DOCUMENT_NAME
from spillway_connector.tiers.frame import PAGE_BYTES, FrameHeader, read_header, verify
from spillway_connector.tiers.inspection import (
    CheckPayload,
    Damage,
    Gone,
    Removal,
    StoredFrame,
    StoredNamespace,
    is_namespace_name,
)
from spillway_connector.tiers.tier import Clock

REMOVAL_SECONDS = 60.0  # to wait for the ledger, per call
_THREADS = 8  # small reads at scattered places: the more wait at once, the better
_BATCH_FRAMES = 64  # per task of a thread
_BATCHES_AHEAD = 2 * _THREADS  # bounds memory, and how far reading runs ahead of whoever walks


_LEDGER = struct.Struct("<8sQQ8s")  # magic, resident bytes, added bytes, xxh3_64 of these: docs/formats.md


class _File(NamedTuple):
    path: str
    inode: int
    mtime_ns: int


class FileInspector:
    """The frames below ``root`` that are files of their own."""

    def __init__(self, root: Path, *, clock: Clock = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._ledger = Ledger(root / LEDGER_NAME, clock)  # opened, and made if it is missing, at the first removal
        self._reader = FramePayloads()

    def exists(self) -> bool:
        return (self._root / LEDGER_NAME).exists() or next(self._walk(""), None) is not None

    def stored_bytes(self) -> int | None:
        """What the ledger counts, read without its lock; None where there is no ledger to be believed."""
        try:
            raw = (self._root / LEDGER_NAME).read_bytes()[: _LEDGER.size]
        except OSError:
            return None
        if len(raw) < _LEDGER.size:
            return None
        _, resident_bytes, _, checksum = _LEDGER.unpack(raw)
        return int(resident_bytes) if xxhash.xxh3_64_digest(raw[:-8]) == checksum else None

    def frames(self, *, headers: bool, namespace_prefix: str = "") -> Iterator[StoredFrame]:
        found = self._walk(namespace_prefix)
        return in_order(found, self._with_header) if headers else found

    def verify(self, frame: StoredFrame, check_payload: CheckPayload | None = None) -> Damage | None:
        """Raises Gone, TierError."""
        file = _file_of(frame)
        try:
            descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise Gone from None
        except OSError as error:
            raise tier_error(error, f"{file.path}: opening a frame") from error
        try:
            status = os.fstat(descriptor)
            if status.st_ino != file.inode:
                raise Gone
            header = _header_of(descriptor)
            if isinstance(header, Damage):
                return header
            size = PAGE_BYTES + -(-header.payload_bytes // PAGE_BYTES) * PAGE_BYTES
            if status.st_size != size:
                reason = CorruptReason.SHORT if status.st_size < size else CorruptReason.LENGTH
                return Damage(reason, f"{status.st_size} bytes, its header announces {size}")
            key = os.path.basename(file.path).removesuffix(FRAME_SUFFIX)
            return self._reader.verify(
                frame, descriptor, 0, header, namespace=frame.namespace, key=key, check_payload=check_payload
            )
        except OSError as error:
            raise tier_error(error, f"{file.path}: reading a frame") from error
        finally:
            os.close(descriptor)

    def remove(self, frames: Sequence[StoredFrame], *, only_unused: bool) -> Removal:
        """Raises TierError."""
        removed = Removal()
        for start in range(0, len(frames), UNLINKS_PER_LOCK):
            batch = frames[start : start + UNLINKS_PER_LOCK]
            try:
                with self._ledger.locked(self._clock() + REMOVAL_SECONDS) as balance:
                    freed: list[StoredFrame] = []
                    try:
                        freed += (frame for frame in batch if self._unlink(balance, _file_of(frame), only_unused))
                    finally:
                        removed += Removal(len(freed), sum(frame.stored_bytes for frame in freed))
                for frame in freed:
                    _remove_empty_parent(_file_of(frame).path)  # which nobody has to wait for
            except OSError as error:
                raise tier_error(error, f"{self._root}: removing frames") from error
        return removed

    def close(self) -> None:
        self._ledger.close()

    def _unlink(self, balance: Balance | None, file: _File, only_unused: bool) -> bool:
        """False where it is gone, replaced or, if that counts, was used since it was seen. Under the ledger's lock."""
        try:
            status = os.stat(file.path)
            if status.st_ino != file.inode or (only_unused and status.st_mtime_ns != file.mtime_ns):
                return False
            if status.st_nlink > 1:
                os.unlink(file.path)  # also a partial file still, whose removal subtracts it
            else:
                self._ledger.remove_file(balance, file.path, status)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _walk(self, namespace_prefix: str) -> Iterator[StoredFrame]:
        for namespace in _folders(self._root):
            if not is_namespace_name(namespace.name) or not namespace.name.startswith(namespace_prefix):
                continue
            digest = bytes.fromhex(namespace.name)
            for first in _folders(namespace.path):
                if first.name == PARTIAL_NAME:
                    continue
                for second in _folders(first.path):
                    yield from self._frames_in(second.path, digest)

    def _frames_in(self, folder: str, namespace: bytes) -> Iterator[StoredFrame]:
        for entry in _entries(folder):
            if not entry.name.endswith(FRAME_SUFFIX):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield StoredFrame(
                namespace,
                status.st_size,
                os.path.relpath(entry.path, self._root),
                _File(entry.path, status.st_ino, status.st_mtime_ns),
                used_s=status.st_mtime_ns / 1e9,
            )

    def _with_header(self, frame: StoredFrame) -> StoredFrame | None:
        file = _file_of(frame)
        try:
            descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise tier_error(error, f"{file.path}: opening a frame") from error
        try:
            header = _header_of(descriptor)
        except OSError as error:
            raise tier_error(error, f"{file.path}: reading a header") from error
        finally:
            os.close(descriptor)
        named = os.path.basename(file.path).removesuffix(FRAME_SUFFIX)
        return with_header(frame, header, namespace=frame.namespace, key=named)


class FramePayloads:
    """Reads whole frames and proves them; past the page cache where the file system allows it, for it is the disk that
    is to be proven, and engines need the cache. Keeps one buffer, as large as needed."""

    def __init__(self) -> None:
        self._buffer = memoryview(b"")

    def verify(
        self,
        frame: StoredFrame,
        descriptor: int,
        offset: int,
        header: FrameHeader,
        *,
        namespace: bytes,
        key: str,
        check_payload: CheckPayload | None,
    ) -> Damage | None:
        """Prove the frame at ``offset`` to be the whole one of ``key`` (hex). Raises OSError."""
        if header.key.hex() != key:
            return Damage(CorruptReason.KEY, f"it holds key {header.key.hex()}, not {key}")
        size = header.payload_bytes
        whole_bytes = PAGE_BYTES + -(-size // PAGE_BYTES) * PAGE_BYTES
        if self._buffer.nbytes < whole_bytes:
            # mmap for its page alignment, which direct I/O needs.
            self._buffer = memoryview(mmap.mmap(-1, whole_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        leave_page_cache(descriptor)
        read_bytes = _read_fully(descriptor, self._buffer[:whole_bytes], offset)
        payload = self._buffer[PAGE_BYTES : min(PAGE_BYTES + size, read_bytes)]
        try:
            verify(self._buffer[:PAGE_BYTES], payload, namespace=namespace, key=header.key, payload_bytes=size)
        except TierCorrupt as corrupt:
            return Damage(corrupt.reason, str(corrupt))
        return None if check_payload is None else check_payload(replace(frame, key=header.key), payload)


def leave_page_cache(descriptor: int) -> None:
    """Direct I/O from now on, where the file system takes it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        pass


def enter_page_cache(descriptor: int) -> None:
    """For file systems that take the flag and refuse the transfer."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)


def _read_fully(descriptor: int, target: memoryview, offset: int) -> int:
    """How many bytes there were, at most all of ``target``. Raises OSError."""
    done = 0
    while done < target.nbytes:
        try:
            count = os.preadv(descriptor, [target[done:]], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                raise
            enter_page_cache(descriptor)
            continue
        if not count:
            break
        done += count
    return done


def with_header(frame: StoredFrame, header: FrameHeader | Damage, *, namespace: bytes, key: str | None) -> StoredFrame:
    """``frame`` with what its header says. key: in hex, that its place says it has; None where no place says so."""
    if isinstance(header, Damage):
        return replace(frame, damage=header)
    damage = None
    if header.namespace != namespace:
        damage = Damage(CorruptReason.NAMESPACE, f"it belongs to namespace {header.namespace.hex()}")
    elif key is not None and header.key.hex() != key:
        damage = Damage(CorruptReason.KEY, f"it holds key {header.key.hex()}")
    elif frame.stored_bytes < PAGE_BYTES + header.payload_bytes:
        damage = Damage(
            CorruptReason.SHORT, f"{frame.stored_bytes} bytes, its header announces {header.payload_bytes} of payload"
        )
    return replace(
        frame,
        key=header.key,
        tenant=header.tenant,
        payload_bytes=header.payload_bytes,
        created_s=header.created_ms / 1000,
        damage=damage,
    )


def in_order(frames: Iterator[StoredFrame], look: Callable[[StoredFrame], StoredFrame | None]) -> Iterator[StoredFrame]:
    """``look`` at each frame in threads, a bounded number ahead; frames for which it is None are left out."""
    with ThreadPoolExecutor(_THREADS, "spillway-inspect") as threads:
        waiting: deque[Future[list[StoredFrame | None]]] = deque()
        try:
            while True:
                batch = list(islice(frames, _BATCH_FRAMES))
                if batch:
                    waiting.append(threads.submit(_look_at_all, look, batch))
                if not waiting:
                    return
                if len(waiting) >= _BATCHES_AHEAD or not batch:
                    yield from (frame for frame in waiting.popleft().result() if frame is not None)
        finally:
            for future in waiting:
                future.cancel()


def _look_at_all(
    look: Callable[[StoredFrame], StoredFrame | None], frames: list[StoredFrame]
) -> list[StoredFrame | None]:
    return [look(frame) for frame in frames]


def namespaces_below(root: Path, prefix: str = "") -> Iterator[StoredNamespace]:
    """Every namespace folder of a root, in either layout. Raises OSError."""
    for folder in sorted(_folders(root), key=lambda entry: entry.name):
        if is_namespace_name(folder.name) and folder.name.startswith(prefix):
            try:
                document = Path(folder.path, DOCUMENT_NAME).read_bytes()
            except FileNotFoundError:
                document = None
            yield StoredNamespace(bytes.fromhex(folder.name), document)


def _header_of(descriptor: int) -> FrameHeader | Damage:
    """Raises OSError."""
    return checked_header(os.pread(descriptor, PAGE_BYTES, 0))


def checked_header(raw: bytes) -> FrameHeader | Damage:
    """The header page of a frame on a disk, or what is wrong with it."""
    try:
        header = read_header(raw)
    except TierCorrupt as corrupt:
        return Damage(corrupt.reason, str(corrupt))
    return header


def _file_of(frame: StoredFrame) -> _File:
    assert isinstance(frame.handle, _File)
    return frame.handle


def _entries(folder: str | os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            yield from found
    except (FileNotFoundError, NotADirectoryError):
        return


def _folders(folder: str | os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
    return (entry for entry in _entries(folder) if entry.is_dir(follow_symlinks=False))


def _remove_empty_parent(path: str) -> None:
    """The inner of the two folders alone: a writer that meets its absence makes it again, in a folder that stays."""
    try:
        os.rmdir(os.path.dirname(path))
    except OSError:
        return


def file_handle(frame: StoredFrame) -> bool:
    """Whether a frame is a file of its own."""
    return isinstance(frame.handle, _File)
