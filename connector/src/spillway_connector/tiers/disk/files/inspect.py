"""An operator's view of a directory with one file per frame, while engines use it.

Walking opens files for reading and does not change their age. Removing takes the ledger's lock as engines' evictions
do, so the bytes in use stay right for all processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from spillway_connector.errors import CorruptReason
from spillway_connector.own_files import (
    NotOwn,
    is_regular,
    kind_of,
    open_own,
    read_own,
    status_of,
    unlink_own,
)
from spillway_connector.tiers.disk.files.ledger import Balance, Ledger, read_balance
from spillway_connector.tiers.disk.files.space import UNLINKS_PER_LOCK
from spillway_connector.tiers.disk.files.tree import FRAME_DEPTH, frames_in, key_of_path, remove_empty_parents
from spillway_connector.tiers.disk.frame_places import FramePlaces
from spillway_connector.tiers.disk.inspection import (
    REMOVAL_SECONDS,
    FramePayloads,
    header_at,
    in_order,
    with_header,
)
from spillway_connector.tiers.disk.io import FRAME_LINKS, tier_error
from spillway_connector.tiers.disk.root import LEDGER_NAME, folders_in
from spillway_connector.tiers.inspection import CheckPayload, Damage, Gone, Removal, StoredFrame, is_namespace_name
from spillway_connector.tiers.tier import Clock


class _File(NamedTuple):
    path: str
    inode: int
    mtime_ns: int


class FileInspector:
    """The frames of the file layout below ``root``."""

    def __init__(self, root: Path, *, clock: Clock = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        # Opened, and made if it is missing, at the first removal.
        self._ledger = Ledger(root / LEDGER_NAME, clock, depth=1, owners_checked=False)
        self._reader = FramePayloads()

    def exists(self) -> bool:
        return (self._root / LEDGER_NAME).exists() or next(self._walk(""), None) is not None

    def stored_bytes(self) -> int | None:
        """The ledger's count, read without its lock; None if there is no intact ledger."""
        try:
            balance = read_balance(read_own(self._root / LEDGER_NAME, 1))
        except OSError:
            return None
        return None if balance is None else balance.resident_bytes

    def frames(self, *, headers: bool, namespace_prefix: str = "") -> Iterator[StoredFrame]:
        found = self._walk(namespace_prefix)
        return in_order(found, self._with_header) if headers else found

    def verify(self, frame: StoredFrame, check_payload: CheckPayload | None = None) -> Damage | None:
        """Read the frame and prove it. Raises Gone, TierError."""
        file = _file_of(frame)
        if frame.damage is not None and frame.damage.reason == CorruptReason.FOREIGN:
            return frame.damage
        try:
            descriptor = open_own(file.path, os.O_RDONLY, FRAME_DEPTH, links=FRAME_LINKS)
        except (FileNotFoundError, NotADirectoryError, NotOwn):
            raise Gone from None
        except OSError as error:
            raise tier_error(error, f"{file.path}: opening a frame") from error
        try:
            status = os.fstat(descriptor)
            if status.st_ino != file.inode:
                raise Gone
            header = header_at(descriptor, 0, status.st_size)
            if isinstance(header, Damage):
                return header
            size = FramePlaces.announced(header).frame_bytes
            if status.st_size != size:
                reason = CorruptReason.SHORT if status.st_size < size else CorruptReason.LENGTH
                return Damage(reason, f"{status.st_size} bytes, its header announces {size}")
            key = key_of_path(file.path)
            return self._reader.verify(
                frame, descriptor, 0, header, namespace=frame.namespace, key=key, check_payload=check_payload
            )
        except OSError as error:
            raise tier_error(error, f"{file.path}: reading a frame") from error
        finally:
            os.close(descriptor)

    def remove(self, frames: Sequence[StoredFrame], *, only_unused: bool) -> Removal:
        """Remove the frame. Raises TierError."""
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
                    remove_empty_parents(_file_of(frame).path, levels=1)  # outside the lock
            except OSError as error:
                raise tier_error(error, f"{self._root}: removing frames") from error
        return removed

    def close(self) -> None:
        self._ledger.close()

    def _unlink(self, balance: Balance | None, file: _File, only_unused: bool) -> bool:
        """Unlink a file, under the ledger's lock. Returns False if it is missing, was replaced or, with
        ``only_unused``, was used since the walk."""
        try:
            status = status_of(file.path, FRAME_DEPTH)
            if status.st_ino != file.inode or (only_unused and status.st_mtime_ns != file.mtime_ns):
                return False
            if status.st_nlink > 1 or not is_regular(status):
                unlink_own(file.path, FRAME_DEPTH)  # also a partial file still, whose removal subtracts it
            else:
                self._ledger.remove_file(balance, file.path, status)
        except (FileNotFoundError, NotADirectoryError, NotOwn):
            return False
        return True

    def _walk(self, namespace_prefix: str) -> Iterator[StoredFrame]:
        for namespace in folders_in(self._root):
            if not is_namespace_name(namespace.name) or not namespace.name.startswith(namespace_prefix):
                continue
            digest = bytes.fromhex(namespace.name)
            for entry in frames_in(namespace.path):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                damage = None
                if not is_regular(status):
                    damage = Damage(CorruptReason.FOREIGN, f"{kind_of(status)} has the name of a frame")
                yield StoredFrame(
                    digest,
                    status.st_size,
                    os.path.relpath(entry.path, self._root),
                    _File(entry.path, status.st_ino, status.st_mtime_ns),
                    used_s=status.st_mtime_ns / 1e9,
                    damage=damage,
                )

    def _with_header(self, frame: StoredFrame) -> StoredFrame | None:
        if frame.damage is not None:
            return frame
        file = _file_of(frame)
        try:
            descriptor = open_own(file.path, os.O_RDONLY, FRAME_DEPTH, links=FRAME_LINKS)
        except (FileNotFoundError, NotADirectoryError, NotOwn):
            return None
        except OSError as error:
            raise tier_error(error, f"{file.path}: opening a frame") from error
        try:
            header = header_at(descriptor, 0, frame.stored_bytes)
        except OSError as error:
            raise tier_error(error, f"{file.path}: reading a header") from error
        finally:
            os.close(descriptor)
        return with_header(frame, header, namespace=frame.namespace, key=key_of_path(file.path))


def _file_of(frame: StoredFrame) -> _File:
    assert isinstance(frame.handle, _File)
    return frame.handle


def file_handle(frame: StoredFrame) -> bool:
    """Whether a frame was found by FileInspector."""
    return isinstance(frame.handle, _File)
