"""Random damage to stored frames, and what a load makes of it: the bytes that were stored, a miss, or never an answer.

A *shelf* is a tier with a few blocks on it whose frames can be read and overwritten without the tier. A *vandal* is one
kind of damage: given the frames of a shelf it returns the damaged ones. Each trial damages a shelf, loads the damaged
blocks and repairs them. All random choices are drawn from one seeded generator.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol

from spillway_connector.errors import TierCorrupt, TierMiss
from spillway_connector.namespace import Namespace
from spillway_connector.testing.cache_first import CacheFirst
from spillway_connector.tiers.disk.files.tier import FileTier
from spillway_connector.tiers.disk.slab.fingerprint import fingerprints, namespace_words
from spillway_connector.tiers.disk.slab.index import SlabIndex
from spillway_connector.tiers.disk.slab.layout import chunk_name
from spillway_connector.tiers.disk.slab.tier import SlabTier
from spillway_connector.tiers.frame import (
    HEADER_BYTES,
    MAGIC,
    PAGE_BYTES,
    Part,
    build_header,
    digest_of_parts,
    digest_of_payload,
    verify,
)
from spillway_connector.tiers.memory import MemoryStore, MemoryTier
from spillway_connector.tiers.redis.stripes import StripePlan, check_together
from spillway_connector.tiers.tier import Tier

WRONG = "WRONG BYTES"
SERVED = "served whole"  # the damage hit padding that is never read, or left the bytes as they were
MISSED = "miss"
BLOCKS = 6  # on each shelf
PAYLOAD_BYTES = 3000  # not a whole page, so that frames on disk have a padded tail
PARTS_PAYLOAD_BYTES = 10_000  # three parts of at most a page
NEVER = 1e9  # of monotonic seconds
OURS = Namespace.of({"model": "corruption", "layout": 1})
THEIRS = Namespace.of({"model": "corruption", "layout": 2})

Frames = list[bytes]
Vandal = Callable[[Frames, random.Random], Mapping[int, bytes]]
"""From all frames of a shelf to the damaged ones by number. The last frame is of another namespace."""
Outcomes = Counter[tuple[str, str, str]]
"""Trials by shelf, kind of damage, and outcome: SERVED, MISSED, WRONG, or the reason of a TierCorrupt."""


# --- damage -----------------------------------------------------------------------------------------------------------


def _place(frames: Frames, lots: random.Random) -> int:
    return lots.randrange(len(frames) - 1)


def one_bit(frames: Frames, lots: random.Random) -> Mapping[int, bytes]:
    place = _place(frames, lots)
    damaged = bytearray(frames[place])
    damaged[lots.randrange(len(damaged))] ^= 1 << lots.randrange(8)
    return {place: bytes(damaged)}


def some_bits(frames: Frames, lots: random.Random) -> Mapping[int, bytes]:
    place = _place(frames, lots)
    damaged = bytearray(frames[place])
    for _ in range(lots.randint(2, 64)):
        damaged[lots.randrange(len(damaged))] ^= 1 << lots.randrange(8)
    return {place: bytes(damaged)}


def header_field(frames: Frames, lots: random.Random) -> Mapping[int, bytes]:
    """Give some aligned 2, 4 or 8 bytes of the header another value."""
    place = _place(frames, lots)
    size = lots.choice((2, 4, 8))
    at = frames[place].index(MAGIC) + lots.randrange(HEADER_BYTES // size) * size
    return {place: frames[place][:at] + lots.randbytes(size) + frames[place][at + size :]}


def noise(frames: Frames, lots: random.Random) -> Mapping[int, bytes]:
    place = _place(frames, lots)
    begin = lots.randrange(len(frames[place]))
    end = min(len(frames[place]), begin + lots.randint(1, 2000))
    return {place: frames[place][:begin] + lots.randbytes(end - begin) + frames[place][end:]}


def zeroed_sectors(frames: Frames, lots: random.Random) -> Mapping[int, bytes]:
    place, size = _place(frames, lots), lots.choice((512, PAGE_BYTES))
    at = lots.randrange(len(frames[place])) // size * size
    damaged = frames[place][:at] + bytes(size) + frames[place][at + size :]
    return {place: damaged[: len(frames[place])]}


def truncated(frames: Frames, lots: random.Random) -> Mapping[int, bytes]:
    place = _place(frames, lots)
    return {place: frames[place][: lots.randrange(len(frames[place]))]}


def lengthened(frames: Frames, lots: random.Random) -> Mapping[int, bytes]:
    place = _place(frames, lots)
    return {place: frames[place] + lots.randbytes(lots.randint(1, PAGE_BYTES))}


def swapped(frames: Frames, lots: random.Random) -> Mapping[int, bytes]:
    one, other = lots.sample(range(len(frames) - 1), 2)
    return {one: frames[other], other: frames[one]}


def misplaced(frames: Frames, lots: random.Random) -> Mapping[int, bytes]:
    """A frame lies in the place of another as well."""
    one, other = lots.sample(range(len(frames) - 1), 2)
    return {one: frames[other]}


def torn(frames: Frames, lots: random.Random) -> Mapping[int, bytes]:
    """A write that ended after some sectors: the rest is of what lay there before."""
    new, old = lots.sample(range(len(frames) - 1), 2)
    size = lots.choice((512, PAGE_BYTES))
    at = lots.randint(0, len(frames[new]) // size) * size
    before = lots.choice((frames[old], bytes(len(frames[new])), lots.randbytes(len(frames[new]))))
    return {new: (frames[new][:at] + before[at:])[: len(frames[new])]}


def torn_within(frames: Frames, lots: random.Random) -> Mapping[int, bytes]:
    """Sectors of a write came in any order, and some did not."""
    new, old = lots.sample(range(len(frames) - 1), 2)
    size = lots.choice((512, PAGE_BYTES))
    pieces = [lots.choice((frames[new], frames[old]))[at : at + size] for at in range(0, len(frames[new]), size)]
    return {new: b"".join(pieces)}


def foreign(frames: Frames, lots: random.Random) -> Mapping[int, bytes]:
    """A whole frame of another namespace, of the same key: the last frame of a shelf has the key of the first."""
    return {lots.choice((0, _place(frames, lots))): frames[-1]}


VANDALS: dict[str, Vandal] = {
    "one bit": one_bit,
    "some bits": some_bits,
    "a header field": header_field,
    "noise": noise,
    "zeroed sector": zeroed_sectors,
    "cut short": truncated,
    "grown": lengthened,
    "two swapped": swapped,
    "one misplaced": misplaced,
    "torn write": torn,
    "sectors out of order": torn_within,
    "foreign namespace": foreign,
}
STALE_INDEX = "stale index entry"


# --- shelves ----------------------------------------------------------------------------------------------------------


class Shelf(Protocol):
    """``frames``: whole, the last one foreign. ``blocks``: which block each of our frames belongs to."""

    name: str
    frames: Frames
    payloads: list[bytes]

    def block_of(self, frame: int) -> int: ...

    def put(self, frame: int, raw: bytes) -> None: ...

    def load(self, block: int) -> bytes:
        """Raises TierCorrupt, TierMiss."""
        ...


class _TierShelf:
    """One frame per block."""

    def __init__(self, name: str, tier: Tier, foreign_tier: Tier) -> None:
        self.name = name
        self.tier = tier
        self.keys = [random.Random(seed).randbytes(36) for seed in range(BLOCKS)]  # noqa: S311 - not secret
        self.payloads = [random.Random(seed).randbytes(PAYLOAD_BYTES) for seed in range(BLOCKS)]  # noqa: S311
        self._target = memoryview(bytearray(PAYLOAD_BYTES))
        for key, payload in zip(self.keys, self.payloads, strict=True):
            tier.store(key, memoryview(payload), NEVER)
        foreign_tier.store(self.keys[0], memoryview(self.payloads[1]), NEVER)
        self.frames: Frames = []

    def block_of(self, frame: int) -> int:
        return frame

    def load(self, block: int) -> bytes:
        self._target[:] = bytes(PAYLOAD_BYTES)
        self.tier.load(self.keys[block], self._target, NEVER)
        return bytes(self._target)


class MemoryShelf(_TierShelf):
    def __init__(self) -> None:
        store = MemoryStore(1 << 20)
        super().__init__("memory", MemoryTier(OURS, PAYLOAD_BYTES, store), MemoryTier(THEIRS, PAYLOAD_BYTES, store))
        self._medium = store.frames
        self.frames = [bytes(self._medium[OURS.digest16, key]) for key in self.keys]
        self.frames.append(bytes(self._medium[THEIRS.digest16, self.keys[0]]))

    def put(self, frame: int, raw: bytes) -> None:
        self._medium[OURS.digest16, self.keys[frame]] = bytearray(raw)


class FileShelf(_TierShelf):
    def __init__(self, root: Path) -> None:
        tier, foreign_tier = (FileTier(namespace, PAYLOAD_BYTES, root) for namespace in (OURS, THEIRS))
        with closing(foreign_tier):
            super().__init__("files", tier, foreign_tier)
        self._paths = [next(root.glob(f"{OURS.hex}/*/*/{key.hex()}.kv")) for key in self.keys]
        foreign_path = next(root.glob(f"{THEIRS.hex}/*/*/{self.keys[0].hex()}.kv"))
        self.frames = [path.read_bytes() for path in [*self._paths, foreign_path]]

    def put(self, frame: int, raw: bytes) -> None:
        descriptor = os.open(self._paths[frame], os.O_WRONLY)
        try:
            os.pwrite(descriptor, raw, 0)
            os.ftruncate(descriptor, len(raw))
        finally:
            os.close(descriptor)


class SlabShelf(_TierShelf):
    def __init__(self, root: Path, name: str = "slab", kind: type[SlabTier] = SlabTier) -> None:
        tier, foreign_tier = (kind(namespace, PAYLOAD_BYTES, root, max_bytes=1 << 20) for namespace in (OURS, THEIRS))
        with closing(foreign_tier):
            super().__init__(name, tier, foreign_tier)
        folder = next(root.glob("slab/*/index")).parent
        index = SlabIndex.open(folder, writable=True)
        assert index is not None
        self.index = index
        self.slots = [self._slot(OURS, key) for key in self.keys]
        self._places = [self._place(folder, slot) for slot in [*self.slots, self._slot(THEIRS, self.keys[0])]]
        self.frames = [self._read(*place) for place in self._places]

    def put(self, frame: int, raw: bytes) -> None:
        """Write a frame over its slot. A frame of another length than the slot's moves the end of the file."""
        path, at = self._places[frame]
        size, whole = self.index.shape.slot_bytes, self.index.shape.chunk_bytes
        descriptor = os.open(path, os.O_WRONLY)
        try:
            if len(raw) < size:
                os.ftruncate(descriptor, at + len(raw))
                os.pwrite(descriptor, raw, at)
            else:
                os.pwrite(descriptor, raw[:size], at)
                os.ftruncate(descriptor, whole + len(raw) - size)
        finally:
            os.close(descriptor)

    def mend(self) -> None:
        """Mend the file; after a cut the frames behind it are lost as well."""
        for frame in range(BLOCKS):
            self.put(frame, self.frames[frame])

    def _slot(self, namespace: Namespace, key: bytes) -> int:
        return int(self.index.find(fingerprints([key], namespace_words(namespace.digest16)))[0])

    def _place(self, folder: Path, slot: int) -> tuple[Path, int]:
        shape = self.index.shape
        chunk = shape.chunk_of(slot)
        return folder / chunk_name(chunk, int(self.index.chunk_epoch[chunk])), shape.offset_of(slot)

    def _read(self, path: Path, at: int) -> bytes:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return os.pread(descriptor, self.index.shape.slot_bytes, at)
        finally:
            os.close(descriptor)


class PartsShelf:
    """Blocks of several frames each, as a Redis server holds them: verified one by one and then together."""

    name = "parts"

    def __init__(self) -> None:
        self._plan = StripePlan.of(PARTS_PAYLOAD_BYTES, PAGE_BYTES)
        blocks = 3
        self._keys = [random.Random(seed).randbytes(36) for seed in range(blocks)]  # noqa: S311 - not secret
        self.payloads = [random.Random(seed).randbytes(PARTS_PAYLOAD_BYTES) for seed in range(blocks)]  # noqa: S311
        self.frames = [frame for block in range(blocks) for frame in self._frames(OURS, block, self.payloads[block])]
        # The frames of two writers of one key who computed different bits: alone each of them is whole.
        self.rivals = [
            frame
            for block in range(blocks)
            for frame in self._frames(OURS, block, bytes(reversed(self.payloads[block])))
        ]
        self.frames.append(self._frames(THEIRS, 0, self.payloads[1])[0])
        self._medium = list(self.frames)

    def block_of(self, frame: int) -> int:
        return frame // self._plan.count

    def put(self, frame: int, raw: bytes) -> None:
        self._medium[frame] = raw

    def load(self, block: int) -> bytes:
        headers, pieces = [], []
        for index, (begin, end) in enumerate(self._plan.ranges):
            raw = memoryview(self._medium[block * self._plan.count + index])
            headers.append(
                verify(
                    raw[:HEADER_BYTES],
                    raw[HEADER_BYTES:],
                    namespace=OURS.digest16,
                    key=self._keys[block],
                    payload_bytes=end - begin,
                    part_index=index,
                    part_count=self._plan.count,
                )
            )
            pieces.append(raw[HEADER_BYTES:])
        check_together(headers)
        return b"".join(pieces)

    def _frames(self, namespace: Namespace, block: int, payload: bytes) -> Frames:
        pieces = [payload[begin:end] for begin, end in self._plan.ranges]
        together = digest_of_parts([digest_of_payload(piece) for piece in pieces])
        return [
            build_header(
                namespace.digest16, self._keys[block], piece, created_ms=1, part=Part(index, len(pieces), together)
            )
            + piece
            for index, piece in enumerate(pieces)
        ]


@contextmanager
def shelves(folder: Path) -> Iterator[list[Shelf]]:
    """One of each kind; those on disk below ``folder``."""
    files, slab = FileShelf(folder / "files"), SlabShelf(folder / "slab")
    cached = SlabShelf(folder / "cached", "page cache", CacheFirst)
    with closing(files.tier), closing(slab.tier), closing(cached.tier):
        yield [MemoryShelf(), PartsShelf(), files, slab, cached]


# --- trials -----------------------------------------------------------------------------------------------------------


def outcome_of(shelf: Shelf, block: int) -> str:
    """The outcome of loading one block."""
    try:
        return SERVED if shelf.load(block) == shelf.payloads[block] else WRONG
    except TierCorrupt as corrupt:
        return corrupt.reason
    except TierMiss:
        return MISSED


def damage_once(shelf: Shelf, kind: str, lots: random.Random, outcomes: Outcomes) -> None:
    """One trial: damage, load what was damaged, mend."""
    damaged = VANDALS[kind](shelf.frames, lots)
    for frame, raw in damaged.items():
        shelf.put(frame, raw)
    for block in {shelf.block_of(frame) for frame in damaged}:
        outcomes[shelf.name, kind, outcome_of(shelf, block)] += 1
    if isinstance(shelf, SlabShelf) and any(len(raw) < len(shelf.frames[0]) for raw in damaged.values()):
        shelf.mend()
    for frame in damaged:
        shelf.put(frame, shelf.frames[frame])


def mix_writers_once(shelf: PartsShelf, lots: random.Random, outcomes: Outcomes) -> None:
    """Replace some parts of a block by those of another writer of the same key."""
    frame = lots.randrange(len(shelf.frames) - 1)
    shelf.put(frame, shelf.rivals[frame])
    outcomes[shelf.name, "parts of two writers", outcome_of(shelf, shelf.block_of(frame))] += 1
    shelf.put(frame, shelf.frames[frame])


def mislead_once(shelf: SlabShelf, lots: random.Random, outcomes: Outcomes) -> None:
    """Index entries point to each other's slots, or to one that has been written to since."""
    one, other = lots.sample(range(BLOCKS), 2)
    slots = [shelf.slots[one], shelf.slots[other]]
    table = shelf.index.buckets.slots
    entries = [int((table == slot + 1).argmax()) for slot in slots]
    names = ("key_low", "key_high")
    before = {name: [int(getattr(shelf.index, name)[slot]) for slot in slots] for name in names}
    both = lots.random() < 0.5
    for name in names:
        shelf.index.put(name, slots[0], before[name][1])
        if both:
            shelf.index.put(name, slots[1], before[name][0])
    shelf.index.put("bucket_slot", entries[1], slots[0] + 1)
    if both:
        shelf.index.put("bucket_slot", entries[0], slots[1] + 1)
    shelf.index.announce()
    for block in (one, other):
        outcomes[shelf.name, STALE_INDEX, outcome_of(shelf, block)] += 1
    for name in names:
        for slot, value in zip(slots, before[name], strict=True):
            shelf.index.put(name, slot, value)
    for entry, slot in zip(entries, slots, strict=True):
        shelf.index.put("bucket_slot", entry, slot + 1)
    shelf.index.announce()


def run(on: list[Shelf], count: int, seed: int, report: Callable[[int], object] = lambda done: None) -> Outcomes:
    """``count`` trials, dealt out over shelves and kinds. ``report`` is called now and then with the number done."""
    lots = random.Random(seed)  # noqa: S311 - reproducible, not secret
    outcomes: Outcomes = Counter()
    kinds = list(VANDALS)
    for done in range(count):
        if done % 1000 == 0:
            report(done)
        shelf = on[done % len(on)]
        if isinstance(shelf, SlabShelf) and lots.random() < 1 / len(kinds):
            mislead_once(shelf, lots, outcomes)
        elif isinstance(shelf, PartsShelf) and lots.random() < 1 / len(kinds):
            mix_writers_once(shelf, lots, outcomes)
        else:
            damage_once(shelf, lots.choice(kinds), lots, outcomes)
    return outcomes
