"""The shared tier read from outside: the content of the directory or of Valkey."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import redis

from spillway_connector.errors import TierError
from spillway_connector.tiers.disk.files.inspect import FileInspector
from spillway_connector.tiers.disk.frame_places import FramePlaces
from spillway_connector.tiers.disk.room import limit_bytes
from spillway_connector.tiers.disk.slab.inspect import SlabInspector
from spillway_connector.tiers.inspection import Gone, StoredFrame
from spillway_connector.tiers.redis.names import RedisNames, parse_name


class SharedStore(Protocol):
    tier: str

    def frames(self) -> int:
        """Number of whole stored blocks."""
        ...

    def clear(self) -> None: ...

    def make_room(self) -> None:
        """Free space, so that no eviction disturbs a test's counts. Call it where no stored block is needed."""
        ...


class NvmeStore:
    """A directory of either layout, as an operator sees it. max_bytes: the engines' setting."""

    tier = "nvme"

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        self.folder = folder
        self._max_bytes = max_bytes

    def files(self) -> list[Path]:
        """The frames of the layout that has one file for each."""
        # os.walk: engines that evict remove folders meanwhile, which makes glob raise.
        found = (Path(folder) / name for folder, _, names in os.walk(self.folder) for name in names)
        return sorted(path for path in found if path.suffix == ".kv")

    def blocks(self) -> dict[bytes, StoredFrame]:
        """Key -> frame, for all frames with a valid header."""
        with _inspectors(self.folder) as inspectors:
            found = [frame for each in inspectors for frame in each.frames(headers=True)]
        return {frame.key: frame for frame in found if frame.key is not None and frame.damage is None}

    def frames(self) -> int:
        try:
            with _inspectors(self.folder) as inspectors:
                return sum(1 for each in inspectors for _ in each.frames(headers=False))
        except TierError:
            return 0  # unreachable: nothing counts as stored

    def holds(self, keys: Iterable[bytes]) -> bool:
        """Whether all these blocks are stored and nothing in them is damaged."""
        found = self.blocks()
        return all(key in found and self._is_whole(found[key]) for key in keys)

    def flip(self, frame: StoredFrame, offset: int) -> None:
        """Another bit at ``offset`` of a frame: its header page, then its payload."""
        name, _, start = frame.place.partition("@")
        with (self.folder / name).open("r+b") as file:
            file.seek(int(start or 0) + offset)
            byte = file.read(1)[0]
            file.seek(int(start or 0) + offset)
            file.write(bytes([byte ^ 0x10]))

    def clear(self) -> None:
        with _inspectors(self.folder) as inspectors:
            for each in inspectors:
                found = list(each.frames(headers=False))
                if found:
                    each.remove(found, only_unused=False)

    def make_room(self) -> None:
        """A small disk holds less than the tier's max_bytes."""
        with _inspectors(self.folder) as inspectors:
            held_bytes = sum(frame.stored_bytes for each in inspectors for frame in each.frames(headers=False))
        if held_bytes > limit_bytes(self.folder, held_bytes, self._max_bytes) / 2:
            self.clear()

    def _is_whole(self, frame: StoredFrame) -> bool:
        with _inspectors(self.folder) as (files, slabs):
            inspector = slabs if "@" in frame.place else files
            try:
                return inspector.verify(frame) is None
            except Gone:
                return False


def payload_offset(frame: StoredFrame, share: float) -> int:
    """A byte of the payload, for NvmeStore.flip. share: 0 for the first, 1 for the last."""
    assert frame.payload_bytes is not None
    return FramePlaces.of(frame.payload_bytes).payload_at + int(share * (frame.payload_bytes - 1))


@contextmanager
def _inspectors(folder: Path) -> Iterator[tuple[FileInspector, SlabInspector]]:
    files, slabs = FileInspector(folder), SlabInspector(folder)
    try:
        yield files, slabs
    finally:
        files.close()
        slabs.close()


class ValkeyStore:
    tier = "redis"

    def __init__(self, url: str) -> None:
        self.server = redis.Redis.from_url(url, socket_timeout=60.0, socket_connect_timeout=60.0)

    def keys(self) -> list[bytes]:
        return sorted(key for key in self.server.scan_iter(match="spillway1:*", count=1000) if b":document" not in key)

    def frames(self) -> int:
        """A large block is several values; its commit record, the one without an index, is written last."""
        try:
            return sum(key.count(b":") == 2 for key in self.keys())
        except redis.RedisError:
            return 0  # unreachable: nothing counts as stored

    def documents(self) -> list[dict[str, Any]]:
        """The namespace documents of the stored blocks, one for each namespace."""
        namespaces = {name.namespace for key in self.keys() if (name := parse_name(key)) is not None}
        return [json.loads(self.server.get(RedisNames(namespace).document) or b"{}") for namespace in namespaces]

    def clear(self) -> None:
        for key in self.keys():
            self.server.unlink(key)

    def make_room(self) -> None:
        memory = self.server.info("memory")
        if memory["used_memory"] > memory["maxmemory"] / 2:
            self.clear()
