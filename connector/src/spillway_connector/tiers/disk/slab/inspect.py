"""An operator's view of a slab directory while engines use it.

The index is read in pieces of each column (index_reader.py). Removing works as engines remove a corrupt frame: under
the root's lock, the slot is freed and its header page is overwritten, so that a rebuilt index does not find it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spillway_connector.errors import CorruptReason
from spillway_connector.own_files import NotOwn, open_own
from spillway_connector.tiers.disk.file_lock import FileLock
from spillway_connector.tiers.disk.inspection import (
    REMOVAL_SECONDS,
    FramePayloads,
    header_at,
    in_order,
    namespaces_below,
    with_header,
)
from spillway_connector.tiers.disk.io import disable_direct, enable_direct, tier_error
from spillway_connector.tiers.disk.root import SLAB_FOLDER
from spillway_connector.tiers.disk.slab.chunks import ZEROS, chunks_on_disk
from spillway_connector.tiers.disk.slab.columns import FileCut
from spillway_connector.tiers.disk.slab.fingerprint import fingerprints, namespace_words
from spillway_connector.tiers.disk.slab.headers import HeaderTable
from spillway_connector.tiers.disk.slab.index import SlabIndex
from spillway_connector.tiers.disk.slab.index_reader import IndexReader, open_index
from spillway_connector.tiers.disk.slab.layout import (
    INDEX_NAME,
    LOCK_DEPTH,
    LOCK_LINKS,
    LOCK_NAME,
    SIZE_CLASS_DEPTH,
    chunk_name,
)
from spillway_connector.tiers.disk.slab.policy import LIVE
from spillway_connector.tiers.disk.slab.space import size_class_folders
from spillway_connector.tiers.frame import PAGE_BYTES, FrameHeader
from spillway_connector.tiers.inspection import CheckPayload, Damage, Gone, Removal, StoredFrame
from spillway_connector.tiers.tier import Clock

SLOTS_PER_LOCK = 32  # slots freed, and header pages overwritten, while writers wait
_SLOTS_PER_READ = 1 << 16  # of each column: bounds memory, about 3 MB
# The generation comes first: an entry that is LIVE after that and has another frame by then has another generation too.
_WALKED = ("generation", "state", "namespace", "tenant", "used_s", "key_low", "key_high")


class _Slot(NamedTuple):
    folder: Path
    index_inode: int
    slot: int
    generation: int
    used_s: int
    chunk_path: str
    offset: int
    fingerprint: tuple[int, int]


class SlabInspector:
    """The frames in slots below ``root``."""

    def __init__(self, root: Path, *, clock: Clock = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._reader = FramePayloads()
        self._lock: FileLock | None = None
        self._opened: dict[Path, tuple[SlabIndex, HeaderTable]] = {}

    def exists(self) -> bool:
        folder = self._root / SLAB_FOLDER
        return folder.is_dir() and not folder.is_symlink()

    def notes(self) -> list[str]:
        """Return a note for each unusable index, whose slots cannot be listed."""
        notes = []
        for folder in self._size_classes():
            with _opened(folder) as index:
                if index is None and _has_chunks(folder):
                    notes.append(
                        f"{folder / INDEX_NAME} is missing or damaged: its frames are not listed; the next engine to "
                        "start makes it again from the slots"
                    )
        return notes

    def frames_in_use(self) -> tuple[int, int, int]:
        """Return the number of frames, their bytes, and the bytes of all chunks and indexes."""
        frames = stored_bytes = disk_bytes = 0
        for folder in self._size_classes():
            with _opened(folder) as index:
                if index is not None:
                    used = index.used_slots()
                    frames += used
                    stored_bytes += used * index.shape.slot_bytes
                    disk_bytes += index.shape.index_bytes
            try:
                disk_bytes += sum(size for _, size in chunks_on_disk(folder).values())
            except OSError as error:
                raise tier_error(error, f"{folder}: listing chunks") from error
        return frames, stored_bytes, disk_bytes

    def frames(self, *, headers: bool, namespace_prefix: str = "") -> Iterator[StoredFrame]:
        """An index holds half of a namespace's digest: if no document has the rest, headers are read in any case."""
        names = {found.digest[:8]: found.digest for found in namespaces_below(self._root)}
        for folder in self._size_classes():
            found = self._walk(folder, names, namespace_prefix)
            if headers:
                yield from in_order(found, self._with_header)
                continue
            for frame in found:
                known = frame if frame.namespace[:8] in names else self._with_header(frame)
                if known is not None:
                    yield known

    def verify(self, frame: StoredFrame, check_payload: CheckPayload | None = None) -> Damage | None:
        """Read the frame and prove it. Raises Gone, TierError."""
        header = self._header(frame)
        if header is None:
            raise Gone
        found = _described(frame, header)
        damage = found.damage
        if damage is None and isinstance(header, FrameHeader):
            damage = self._verify_payload(found, header, check_payload)
        if damage is not None and not self._is_still(_slot_of(frame)):
            raise Gone  # overwritten while it was read
        return damage

    def remove(self, frames: Sequence[StoredFrame], *, only_unused: bool) -> Removal:
        """Remove the frame. Raises TierError."""
        removed = Removal()
        for start in range(0, len(frames), SLOTS_PER_LOCK):
            by_folder: dict[Path, list[StoredFrame]] = {}
            for frame in frames[start : start + SLOTS_PER_LOCK]:
                by_folder.setdefault(_slot_of(frame).folder, []).append(frame)
            for folder, here in by_folder.items():
                try:
                    removed += self._remove_in(folder, here, only_unused)
                except OSError as error:
                    raise tier_error(error, f"{folder}: removing frames") from error
        return removed

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    # --- walking ------------------------------------------------------------------------------------------------------

    def _walk(self, folder: Path, names: dict[bytes, bytes], namespace_prefix: str) -> Iterator[StoredFrame]:
        with _opened(folder) as index:
            if index is None:
                return
            epochs = index.column("chunk_epoch", 0, index.shape.chunks)
            for first in range(0, index.shape.slots, _SLOTS_PER_READ):
                count = min(_SLOTS_PER_READ, index.shape.slots - first)
                columns = {name: index.column(name, first, count) for name in _WALKED}
                chunks = np.arange(first, first + count) // index.shape.slots_per_chunk
                live = (columns["state"] == LIVE) & (epochs[chunks] != 0)
                if namespace_prefix:
                    live &= _in_namespaces(columns["namespace"], names, namespace_prefix)
                rows = np.flatnonzero(live)
                entries = {name: columns[name][rows].tolist() for name in _WALKED}
                yield from _frames(index, folder, (rows + first).tolist(), entries=entries, epochs=epochs, names=names)

    def _with_header(self, frame: StoredFrame) -> StoredFrame | None:
        header = self._header(frame)
        if header is None:
            return None
        found = _described(frame, header)
        if found.damage is not None and not self._is_still(_slot_of(frame)):
            return None  # overwritten while it was read
        return found

    def _header(self, frame: StoredFrame) -> FrameHeader | Damage | None:
        """Read the frame's header; None: the chunk has gone. Raises TierError."""
        place = _slot_of(frame)
        try:
            descriptor = open_own(place.chunk_path, os.O_RDONLY, SIZE_CLASS_DEPTH)
        except FileNotFoundError:
            return None
        except NotOwn as foreign:
            return Damage(CorruptReason.FOREIGN, str(foreign.strerror))
        except OSError as error:
            raise tier_error(error, f"{place.folder}: opening a chunk") from error
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead into payloads
            return header_at(descriptor, place.offset, frame.stored_bytes)
        except OSError as error:
            raise tier_error(error, f"{place.folder}: reading a header") from error
        finally:
            os.close(descriptor)

    def _verify_payload(
        self, frame: StoredFrame, header: FrameHeader, check_payload: CheckPayload | None
    ) -> Damage | None:
        place = _slot_of(frame)
        try:
            descriptor = open_own(place.chunk_path, os.O_RDONLY, SIZE_CLASS_DEPTH)
        except (FileNotFoundError, NotOwn):
            raise Gone from None
        except OSError as error:
            raise tier_error(error, f"{place.folder}: opening a chunk") from error
        try:
            return self._reader.verify(
                frame,
                descriptor,
                place.offset,
                header,
                namespace=frame.namespace,
                key=header.key.hex(),
                check_payload=check_payload,
            )
        except OSError as error:
            raise tier_error(error, f"{place.folder}: reading a frame") from error
        finally:
            os.close(descriptor)

    def _is_still(self, place: _Slot) -> bool:
        """Whether the slot holds the entry that the walk saw."""
        with _opened(place.folder) as index:
            return (
                index is not None
                and index.inode == place.index_inode
                and index.element("state", place.slot) == LIVE
                and index.element("generation", place.slot) == place.generation
            )

    # --- removing -----------------------------------------------------------------------------------------------------

    def _remove_in(self, folder: Path, frames: Sequence[StoredFrame], only_unused: bool) -> Removal:
        if self._lock is None:
            path = self._root / SLAB_FOLDER / LOCK_NAME
            self._lock = FileLock(path, self._clock, LOCK_DEPTH, links=LOCK_LINKS, owners_checked=False)
        removed = Removal()
        with self._lock.held(self._clock() + REMOVAL_SECONDS):
            opened = self._writable(folder)
            if opened is None:
                return removed
            index, headers = opened
            with _cut_is_an_error(folder), index.changing():
                if index.counter("dirty"):
                    index.recover()
                index.put("dirty", 0, 1)  # if this process is killed, the next holder of the lock recovers the index
                for frame in frames:
                    place = _slot_of(frame)
                    if (
                        index.identity[1] != place.index_inode
                        or index.state[place.slot] != LIVE
                        or index.generation[place.slot] != place.generation
                        or (only_unused and index.fresh("used_s", place.slot) != place.used_s)
                    ):
                        continue
                    index.release(place.slot)
                    headers.clear(place.slot)
                    try:
                        _blank(place.chunk_path, place.offset, frame.stored_bytes)
                    except (FileNotFoundError, NotOwn):
                        pass  # the chunk was removed or replaced, and the frame with it
                    removed += Removal(1, frame.stored_bytes)
                index.put("dirty", 0, 0)
        return removed

    def _writable(self, folder: Path) -> tuple[SlabIndex, HeaderTable] | None:
        """The index and the header table as they are under the lock. Raises OSError."""
        opened = self._opened.get(folder)
        if opened is not None:
            status = os.stat(folder / INDEX_NAME, follow_symlinks=False)
            if (status.st_dev, status.st_ino) == opened[0].identity:
                return opened
        index = SlabIndex.open(folder, writable=True, owners_checked=False)
        if index is None:
            return None
        self._opened[folder] = index, HeaderTable(folder, index.shape, owners_checked=False)
        return self._opened[folder]

    def _size_classes(self) -> list[Path]:
        try:
            return sorted(size_class_folders(self._root))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise tier_error(error, f"{self._root}: listing size classes") from error


@contextmanager
def _opened(folder: Path) -> Iterator[IndexReader | None]:
    """Open an index as open_index does, but raise TierError for an OSError of opening or reading."""
    try:
        with open_index(folder) as index:
            yield index
    except OSError as error:
        raise tier_error(error, f"{folder}: reading the index") from error


@contextmanager
def _cut_is_an_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except FileCut as cut:
        raise OSError(cut.errno, f"{folder / INDEX_NAME} was cut; the next engine to store makes it again") from None


def _frames(
    index: IndexReader,
    folder: Path,
    slots: list[int],
    *,
    entries: dict[str, list[int]],
    epochs: npt.NDArray[np.generic],
    names: dict[bytes, bytes],
) -> Iterator[StoredFrame]:
    """The entries of ``slots``. names: namespaces by the first half of their digests."""
    shape, chunk, chunk_path, place = index.shape, -1, "", ""
    fields = zip(slots, *(entries[name] for name in _WALKED if name != "state"), strict=True)
    for slot, generation, namespace, tenant, used_s, key_low, key_high in fields:
        if chunk != shape.chunk_of(slot):
            chunk = shape.chunk_of(slot)
            name = chunk_name(chunk, int(epochs[chunk]))
            chunk_path, place = f"{folder}/{name}", f"{SLAB_FOLDER}/{shape.slot_bytes}/{name}"
        low = namespace.to_bytes(8, "little")
        offset = shape.offset_of(slot)
        yield StoredFrame(
            names.get(low) or low + bytes(8),
            shape.slot_bytes,
            f"{place}@{offset}",
            _Slot(folder, index.inode, slot, generation, used_s, chunk_path, offset, (key_low, key_high)),
            tenant=tenant.to_bytes(8, "little"),
            used_s=float(used_s),
        )


def _in_namespaces(halves: npt.NDArray[np.generic], names: dict[bytes, bytes], prefix: str) -> npt.NDArray[np.bool_]:
    """Choose the half digests that are, or may be, of namespaces that begin with ``prefix``."""
    wanted = []
    for half in np.unique(halves).tolist():
        low = int(half).to_bytes(8, "little")
        known = names.get(low)
        if low.hex().startswith(prefix[:16]) if known is None else known.hex().startswith(prefix):
            wanted.append(half)
    return np.isin(halves, np.array(wanted, np.uint64))


def _described(frame: StoredFrame, header: FrameHeader | Damage) -> StoredFrame:
    """``frame`` with the contents of its header, compared with the index."""
    if isinstance(header, Damage):
        return replace(frame, damage=header)
    # The index has half of a namespace's digest; without a document, only frames have all of it.
    namespace = header.namespace if header.namespace[:8] == frame.namespace[:8] else frame.namespace
    found = with_header(replace(frame, namespace=namespace), header, namespace=namespace, key=None)
    if found.damage is None:
        low, high = fingerprints([header.key], namespace_words(header.namespace))[0].tolist()
        if _slot_of(frame).fingerprint != (low, high):
            damage = Damage(CorruptReason.KEY, f"it holds key {header.key.hex()}, the index has another one here")
            return replace(found, damage=damage)
    return found


def _blank(chunk_path: str, offset: int, slot_bytes: int) -> None:
    """Overwrite the pages of a slot that may hold its header; directly, because a dirty page would stall an engine's
    later write. OSError."""
    descriptor = open_own(chunk_path, os.O_WRONLY, SIZE_CLASS_DEPTH, owners_checked=False)
    try:
        enable_direct(descriptor)
        for at in (offset, offset + slot_bytes - PAGE_BYTES):
            try:
                os.pwritev(descriptor, [ZEROS], at)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                disable_direct(descriptor)
                os.pwritev(descriptor, [ZEROS], at)
    finally:
        os.close(descriptor)


def _has_chunks(folder: Path) -> bool:
    try:
        return bool(chunks_on_disk(folder))
    except OSError:
        return False


def _slot_of(frame: StoredFrame) -> _Slot:
    assert isinstance(frame.handle, _Slot)
    return frame.handle
