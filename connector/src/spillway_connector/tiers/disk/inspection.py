"""Functions of the inspectors of both layouts: checking headers, proving payloads, namespaces, reading in threads."""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path

from spillway_connector.errors import CorruptReason, TierCorrupt
from spillway_connector.own_files import NotOwn, read_own
from spillway_connector.tiers.disk.frame_places import FramePlaces, last_header_at
from spillway_connector.tiers.disk.io import disable_direct, enable_direct
from spillway_connector.tiers.disk.root import DOCUMENT_NAME, folders_in
from spillway_connector.tiers.frame import HEADER_BYTES, PAGE_BYTES, FrameHeader, read_header, verify
from spillway_connector.tiers.inspection import CheckPayload, Damage, StoredFrame, StoredNamespace, is_namespace_name

REMOVAL_SECONDS = 60.0  # the longest that a removal waits for a lock, per call
_THREADS = 8  # small reads at scattered places: a disk serves many at once
_BATCH_FRAMES = 64  # per task of a thread
_BATCHES_AHEAD = 2 * _THREADS  # bounds memory, and how far reading runs ahead of the consumer


def namespaces_below(root: Path, prefix: str = "") -> Iterator[StoredNamespace]:
    """Every namespace folder of a root, in either layout. Raises OSError."""
    for folder in sorted(folders_in(root), key=lambda entry: entry.name):
        if is_namespace_name(folder.name) and folder.name.startswith(prefix):
            try:
                document = read_own(f"{folder.path}/{DOCUMENT_NAME}", 2)
            except (FileNotFoundError, NotOwn):
                document = None
            yield StoredNamespace(bytes.fromhex(folder.name), document)


def header_at(descriptor: int, offset: int, frame_bytes: int) -> FrameHeader | Damage:
    """Return the header of the frame at ``offset``, or its damage. Raises OSError.

    Any engine's frame may lie there, so both places of a header are looked at.
    """
    first = _checked_header(os.pread(descriptor, PAGE_BYTES, offset))
    if isinstance(first, FrameHeader):
        return first
    last = _checked_header(os.pread(descriptor, HEADER_BYTES, offset + last_header_at(frame_bytes)))
    no_header = isinstance(last, Damage) and last.reason in (CorruptReason.SHORT, CorruptReason.MAGIC)
    return first if no_header else last


def _checked_header(raw: bytes) -> FrameHeader | Damage:
    try:
        header = read_header(raw)
    except TierCorrupt as corrupt:
        return Damage(corrupt.reason, str(corrupt))
    return header


def with_header(frame: StoredFrame, header: FrameHeader | Damage, *, namespace: bytes, key: str | None) -> StoredFrame:
    """Return ``frame`` with the contents of its header.

    key: the key, in hex, that the frame's place stands for; None if places do not determine keys.
    """
    if isinstance(header, Damage):
        return replace(frame, damage=header)
    damage = None
    if header.namespace != namespace:
        damage = Damage(CorruptReason.NAMESPACE, f"it belongs to namespace {header.namespace.hex()}")
    elif key is not None and header.key.hex() != key:
        damage = Damage(CorruptReason.KEY, f"it holds key {header.key.hex()}")
    elif frame.stored_bytes < header.header_bytes + header.payload_bytes:
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


class FramePayloads:
    """Reads whole frames and proves them, with direct I/O if the file system takes it: what is on the disk is to be
    proven, and engines need the page cache. Keeps one buffer, as large as needed. Not safe from several threads."""

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
        size, places = header.payload_bytes, FramePlaces.announced(header)
        whole_bytes = places.frame_bytes
        if self._buffer.nbytes < whole_bytes:
            # mmap for its page alignment, which direct I/O needs.
            self._buffer = memoryview(mmap.mmap(-1, whole_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        enable_direct(descriptor)
        read_bytes = _read_fully(descriptor, self._buffer[:whole_bytes], offset)
        read = self._buffer[:read_bytes]
        payload = read[places.payload_at : places.payload_at + size]
        raw_header = read[places.header_at : places.header_at + places.header_bytes]
        try:
            verify(raw_header, payload, namespace=namespace, key=header.key, payload_bytes=size)
        except TierCorrupt as corrupt:
            return Damage(corrupt.reason, str(corrupt))
        return None if check_payload is None else check_payload(replace(frame, key=header.key), payload)


def in_order(frames: Iterator[StoredFrame], look: Callable[[StoredFrame], StoredFrame | None]) -> Iterator[StoredFrame]:
    """Yield ``look`` of each frame, computed in threads a bounded number ahead, without those that are None."""
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


def _read_fully(descriptor: int, target: memoryview, offset: int) -> int:
    """Fill ``target`` and return the bytes that were read, which may be fewer. Raises OSError."""
    done = 0
    while done < target.nbytes:
        try:
            count = os.preadv(descriptor, [target[done:]], offset + done)
        except OSError as error:
            # Some file systems accept O_DIRECT and reject the transfer.
            if error.errno != errno.EINVAL or not disable_direct(descriptor):
                raise
            continue
        if not count:
            break
        done += count
    return done
