"""An NVMe tier's directory as an operator sees it: one file per frame, slabs, or what is left of both."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from spillway_connector.errors import RefusedReason, TierRefused
from spillway_connector.tiers.disk.clock import CLOCK_PREFIX, AgeClock, boot_tag
from spillway_connector.tiers.disk.files.inspect import FileInspector, file_handle
from spillway_connector.tiers.disk.inspection import namespaces_below
from spillway_connector.tiers.disk.io import tier_error
from spillway_connector.tiers.disk.room import FREE_FRACTION, file_system_share
from spillway_connector.tiers.disk.root import access_warning
from spillway_connector.tiers.disk.slab.inspect import SlabInspector
from spillway_connector.tiers.inspection import CheckPayload, Damage, Removal, StoredFrame, StoredNamespace
from spillway_connector.tiers.tier import Clock
from spillway_ctl.store import Extent

_REMEDY = "give the path of an engine's NVMe tier (offload.sharedTier.nvme.path)"


class NvmeStore:
    """See store.Store. ``root`` is looked at, never made.

    max_bytes: the bound that engines were given, if it is known.
    """

    kind = "nvme"

    def __init__(self, root: Path, *, max_bytes: int | None = None, clock: Clock = time.monotonic) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._clock = clock
        self._files = FileInspector(root, clock=clock)
        self._slabs = SlabInspector(root, clock=clock)
        self._walk_bytes: int | None = None
        self._walked_bytes = 0

    @property
    def location(self) -> str:
        return str(self._root)

    @property
    def layout(self) -> str:
        return " and ".join(name for name, part in (("files", self._files), ("slab", self._slabs)) if part.exists())

    def now_s(self) -> float:
        """The time by the clock of this node's engines, if they have set one; nothing is written if they have not."""
        ages = AgeClock(self._root, self._clock, time.time)
        if (self._root / f"{CLOCK_PREFIX}{boot_tag()}").exists():
            ages.share()
        return ages.now_ns() / 1e9

    def check(self) -> None:
        try:
            holds_something = next(iter(os.scandir(self._root)), None) is not None
        except FileNotFoundError:
            raise TierRefused(RefusedReason.OTHER, f"{self._root}: there is no such directory; {_REMEDY}") from None
        except OSError as error:
            raise tier_error(error, f"{self._root}: opening the directory") from error
        if holds_something and not self.layout and next(self.namespaces(), None) is None:
            raise TierRefused(
                RefusedReason.OTHER,
                f"{self._root} is not a directory of Spillway's (no space.ledger, slab folder or namespace is in it); "
                f"{_REMEDY}",
            )

    def notes(self) -> list[str]:
        notes = self._slabs.notes()
        warning = access_warning(self._root)
        if warning is not None:
            notes.append(warning)
        if self._files.exists() and self._slabs.exists():
            notes.append(
                f"{self._root} holds frames of both layouts; engines with mode: auto use the slabs alone and never "
                "evict the files"
            )
        return notes

    def extent(self) -> Extent:
        frames_bytes, disk_bytes = self._bytes()
        try:
            share = file_system_share(self._root, disk_bytes)
        except OSError as error:
            raise tier_error(error, f"{self._root}: asking the file system for its size") from error
        if self._max_bytes is not None and self._max_bytes <= share:
            return Extent(frames_bytes, self._max_bytes, "maxBytes")
        return Extent(frames_bytes, share, f"{FREE_FRACTION:.0%} of what the file system can give")

    def namespaces(self) -> Iterator[StoredNamespace]:
        try:
            yield from namespaces_below(self._root)
        except OSError as error:
            raise tier_error(error, f"{self._root}: listing namespaces") from error

    def frames(self, *, headers: bool, namespace_prefix: str = "") -> Iterator[StoredFrame]:
        self._walked_bytes = 0
        self._walk_bytes = None if namespace_prefix else self._bytes()[0]
        for part in (self._files, self._slabs):
            for frame in part.frames(headers=headers, namespace_prefix=namespace_prefix):
                self._walked_bytes += frame.stored_bytes
                yield frame

    def share_walked(self) -> float | None:
        """Bytes of the walk against bytes in use at its start. The size of a namespace is not known before."""
        return min(1.0, self._walked_bytes / self._walk_bytes) if self._walk_bytes else None

    def verify(self, frame: StoredFrame, check_payload: CheckPayload | None = None) -> Damage | None:
        part = self._files if file_handle(frame) else self._slabs
        return part.verify(frame, check_payload)

    def remove(self, frames: Sequence[StoredFrame], *, only_unused: bool) -> Removal:
        in_files = [frame for frame in frames if file_handle(frame)]
        in_slots = [frame for frame in frames if not file_handle(frame)]
        return self._files.remove(in_files, only_unused=only_unused) + self._slabs.remove(
            in_slots, only_unused=only_unused
        )

    def sweep(self, namespace: bytes) -> None:
        """Do nothing: the document, a few hundred bytes, stays for an engine that may be using it."""

    def _bytes(self) -> tuple[int, int]:
        """The bytes of frames in use, and the bytes of all files, which include free slots."""
        _, in_slots, disk_bytes = self._slabs.frames_in_use()
        in_files = self._files.stored_bytes() or 0
        return in_files + in_slots, in_files + disk_bytes

    def close(self) -> None:
        self._files.close()
        self._slabs.close()
