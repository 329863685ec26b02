"""The index of rows that the engines of a node share: which chunk is in which row, and who uses it.

It lies in memory that all of them map. Every change is made by the holder of one lock (node/region.py); a look-up reads
without it. One word of a row, its stamp, says all that counts: the generation, a number that no other use of any row
ever has, and the state. What belongs to a claim is written before its stamp, so a holder of the lock that is killed
between two words leaves rows as they were before or as they were to be; what is merely derived (the number of free
rows, which segments have changed) the next holder counts again.

Pure: no I/O, no lock, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

VERSION = 2
ENGINES_MAX = 64
KEY_BYTES_MAX = 64
NAMESPACE_BYTES = 16
IDENTITY_BYTES = 16
FREE, WRITING, READY = 0, 1, 2  # the state of a row, in the low bits of its stamp
NO_STAMP = (1 << 64) - 1  # no row ever has it: there is no such state
DEAD_ROWS_KEPT_MS = 1000  # a copy that a killed engine's device had begun ends within it

Rows = npt.NDArray[np.intp]
U64 = npt.NDArray[np.uint64]

_MAGIC = int.from_bytes(b"spillnod", "little")
_STATE = np.uint64(3)
STATE_BITS = 2
_SEGMENT_BITS = 10  # rows of which one word says whether any has changed: 1,024
_HEADER_WORDS = 512
_ENGINES_FROM = 64  # in the header: of each place the number of its engine, and when it was found dead, in ms
# Words of the header.
_MARK, _VERSION, _ROWS, _ROW_BYTES, _CHANGES, _DIRTY, _GENERATION, _FREE_ROWS, SEARCHED, _IDENTITY = range(10)


class Entry(NamedTuple):
    """What a row holds. The stamp of a free row counts alone."""

    stamp: int
    namespace: bytes = b""
    key: bytes = b""

    @property
    def state(self) -> int:
        return self.stamp & 3

    @property
    def generation(self) -> int:
        return self.stamp >> STATE_BITS


class NodeIndex:
    """A view of the index in `memory`. Methods that change it are for the holder of the lock, between begin and end."""

    def __init__(self, memory: memoryview, num_rows: int) -> None:
        """memory: `bytes_of(num_rows)` bytes, writable."""
        self.num_rows = num_rows
        offset = 0

        def column(kind: type[np.generic], *shape: int) -> npt.NDArray[np.generic]:
            nonlocal offset
            array = np.frombuffer(memory, kind, int(np.prod(shape)), offset).reshape(shape)
            offset += -(-array.nbytes // 64) * 64
            return array

        self._header: U64 = column(np.uint64, _HEADER_WORDS)  # type: ignore[assignment]
        self.stamps: U64 = column(np.uint64, num_rows)  # type: ignore[assignment]
        self.checks: U64 = column(np.uint64, num_rows)  # type: ignore[assignment]
        self.used_ms: U64 = column(np.uint64, num_rows)  # type: ignore[assignment]
        self._segments: U64 = column(np.uint64, (num_rows >> _SEGMENT_BITS) + 1)  # type: ignore[assignment]
        self._owners: npt.NDArray[np.uint8] = column(np.uint8, num_rows)  # type: ignore[assignment]
        self._key_bytes: npt.NDArray[np.uint8] = column(np.uint8, num_rows)  # type: ignore[assignment]
        # Namespace and key of each row.
        self._keys: npt.NDArray[np.uint8] = column(  # type: ignore[assignment]
            np.uint8, num_rows, NAMESPACE_BYTES + KEY_BYTES_MAX
        )
        self._pins: npt.NDArray[np.uint8] = column(np.uint8, num_rows, ENGINES_MAX)  # type: ignore[assignment]
        self._size_bytes = offset
        self._words = memory[: _HEADER_WORDS * 8].cast("Q")  # a tenth of the time of an array's element
        self._engines = self._header[_ENGINES_FROM : _ENGINES_FROM + 2 * ENGINES_MAX].reshape(ENGINES_MAX, 2)

    @classmethod
    def bytes_of(cls, num_rows: int) -> int:
        segments = (num_rows >> _SEGMENT_BITS) + 1
        a_row = 3 * 8 + 2 + NAMESPACE_BYTES + KEY_BYTES_MAX + ENGINES_MAX
        return _HEADER_WORDS * 8 + a_row * num_rows + 8 * segments + 8 * 64  # each column begins at a cache line

    def format(self, row_bytes: int, identity: bytes) -> None:
        """Begin an index in memory that is zero: every row is free. Its mark comes last.

        identity: IDENTITY_BYTES, of this index and no other one.
        """
        header = self._header
        header[_IDENTITY : _IDENTITY + IDENTITY_BYTES // 8] = np.frombuffer(identity, np.uint64)
        header[_VERSION], header[_ROWS], header[_ROW_BYTES] = VERSION, self.num_rows, row_bytes
        header[_FREE_ROWS] = self.num_rows
        header[_MARK] = _MAGIC

    @staticmethod
    def explain_header(head: bytes, num_rows: int, row_bytes: int) -> str | None:
        """Why an index that begins so is not one of these rows, as half a sentence; None if it is."""
        words = np.frombuffer(head[: 4 * 8], np.uint64).tolist() if len(head) >= 4 * 8 else [0]
        if words[0] != _MAGIC:
            return "it was never finished"
        if words[1] != VERSION:
            return f"it has version {words[1]}, and this engine writes version {VERSION}"
        if words[2:4] != [num_rows, row_bytes]:
            return f"it has {words[2]} rows of {words[3]} bytes, and this engine is to have {num_rows} of {row_bytes}"
        return None

    # -- changes

    def begin(self) -> None:
        """The lock was taken: mend what a killed holder left."""
        if self._words[_DIRTY]:
            self._segments += np.uint64(1)
            self._words[_CHANGES] += 1
            self._words[_FREE_ROWS] = int(np.count_nonzero((self.stamps & _STATE) == FREE))
        self._words[_DIRTY] = 1

    def end(self) -> None:
        self._words[_DIRTY] = 0

    def claim(self, rows: Rows, namespace: bytes, keys: Sequence[bytes], place: int, now_ms: int) -> None:
        """The engine at `place` is going to write these chunks to rows that are free."""
        first = self._words[_GENERATION] + 1
        self._words[_GENERATION] += len(keys)
        generations = np.arange(first, first + len(keys), dtype=np.uint64)
        padded = b"".join((namespace + key).ljust(NAMESPACE_BYTES + KEY_BYTES_MAX, b"\x00") for key in keys)
        self._keys[rows] = np.frombuffer(padded, np.uint8).reshape(len(keys), NAMESPACE_BYTES + KEY_BYTES_MAX)
        self._key_bytes[rows] = [len(key) for key in keys]
        self._owners[rows] = place
        self._pins[rows] = 0
        self.used_ms[rows] = now_ms
        self.checks[rows] = [
            check_of(namespace, key, generation)
            for key, generation in zip(keys, range(first, first + len(keys)), strict=True)
        ]
        self.stamps[rows] = (generations << np.uint64(STATE_BITS)) | np.uint64(WRITING)
        self._words[_FREE_ROWS] -= len(keys)
        self._note(rows)

    def publish(self, rows: Rows) -> None:
        """What was being written is there."""
        self.stamps[rows] = (self.stamps[rows] & ~_STATE) | np.uint64(READY)
        self._note(rows)

    def free(self, rows: Rows) -> None:
        """Nothing is in these rows any more, which were not free."""
        self.stamps[rows] &= ~_STATE
        self._words[_FREE_ROWS] += len(rows)
        self._note(rows)

    def pin(self, rows: Rows, place: int) -> None:
        """The engine at `place` reads these rows: they are not to be freed."""
        self._pins[rows, place] = 1

    def unpin(self, rows: Rows, place: int) -> None:
        """The same engine reads them no longer. Without the lock: it only allows more."""
        self._pins[rows, place] = 0

    def use(self, rows: Rows, now_ms: int) -> None:
        """A request uses these rows. Without the lock: the order of eviction follows it, nothing else."""
        self.used_ms[rows] = now_ms

    def take_free(self, count: int) -> Rows:
        """Up to `count` free rows. The search continues after the last one, so rows often lie side by side."""
        found: list[Rows] = []
        missing, first = count, self._words[SEARCHED]
        for segment in range(first, first + len(self._segments)):
            if missing <= 0:
                break
            self._words[SEARCHED] = segment % len(self._segments)
            start = self._words[SEARCHED] << _SEGMENT_BITS
            free = np.flatnonzero((self.stamps[start : start + (1 << _SEGMENT_BITS)] & _STATE) == FREE)[:missing]
            found.append(free + start)
            missing -= len(free)
        return np.concatenate(found) if found else np.empty(0, np.intp)

    def _note(self, rows: Rows) -> None:
        self._segments[np.unique(rows >> _SEGMENT_BITS)] += np.uint64(1)
        self._words[_CHANGES] += 1

    # -- engines

    def join(self, number: int) -> int | None:
        """A place for an engine; None if all are taken."""
        for place in range(ENGINES_MAX):
            if not self._engines[place, 0]:
                self._pins[:, place] = 0
                self._engines[place] = number, 0
                return place
        return None

    def sweep(self, is_held: Callable[[int], bool], own: int | None, now_ms: int) -> int:
        """Release what killed engines had claimed. Returns how many rows.

        is_held: whether a process of the engine of that number still runs. What such an engine read is let go at once;
        what it was writing, DEAD_ROWS_KEPT_MS later.
        """
        released = 0
        for place in np.flatnonzero(self._engines[:, 0]).tolist():
            number, dead_ms = self._engines[place].tolist()
            if place == own or (not dead_ms and is_held(number)):
                continue
            if not dead_ms:
                self._pins[:, place] = 0
                self._engines[place, 1] = max(now_ms, 1)
            elif abs(now_ms - dead_ms) >= DEAD_ROWS_KEPT_MS:
                left = self.written_by(place)
                if len(left):
                    self.free(left)
                self._engines[place] = 0
                released += len(left)
        return released

    def written_by(self, place: int) -> Rows:
        """The rows that the engine at `place` has claimed and not published."""
        return np.flatnonzero(((self.stamps & _STATE) == WRITING) & (self._owners == place))

    def engines(self) -> int:
        """How many engines have a place."""
        return int(np.count_nonzero(self._engines[:, 0]))

    # -- looks, without the lock

    @property
    def version(self) -> int:
        """Another number than at the last look: rows have changed."""
        return self._words[_CHANGES]

    @property
    def free_rows(self) -> int:
        return self._words[_FREE_ROWS]

    @property
    def identity(self) -> bytes:
        return self._header[_IDENTITY : _IDENTITY + IDENTITY_BYTES // 8].tobytes()

    @property
    def generation(self) -> int:
        """The latest of all rows."""
        return self._words[_GENERATION]

    def new_segments(self) -> U64:
        """For :meth:`changed_rows`, before the first call: everything has changed."""
        return np.full(len(self._segments), np.iinfo(np.uint64).max, np.uint64)

    def changed_rows(self, seen: U64, segments: U64) -> list[int]:
        """The rows whose stamps are not those in `seen`. segments: brought up to date here; `seen` by the caller."""
        moved = np.flatnonzero(self._segments != segments)
        segments[moved] = self._segments[moved]  # before the stamps are read
        found: list[int] = []
        for start in (moved << _SEGMENT_BITS).tolist():
            end = start + (1 << _SEGMENT_BITS)
            found += (np.flatnonzero(self.stamps[start:end] != seen[start:end]) + start).tolist()
        return found

    def entry(self, row: int) -> Entry | None:
        """What a row holds; None if that is changing at this moment or damaged."""
        stamp = int(self.stamps[row])
        if not stamp & 3:
            return Entry(stamp)
        words = self._keys[row].tobytes()
        length = int(self._key_bytes[row])
        namespace, key = words[:NAMESPACE_BYTES], words[NAMESPACE_BYTES : NAMESPACE_BYTES + length]
        if int(self.checks[row]) != check_of(namespace, key, stamp >> STATE_BITS) or int(self.stamps[row]) != stamp:
            return None
        return Entry(stamp, namespace, key)

    def are_ready(self, rows: Rows) -> bool:
        """Whether all of these rows hold a chunk."""
        return bool(((self.stamps[rows] & _STATE) == READY).all())

    def pinned(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Tell of each row whether any engine reads it."""
        pins: npt.NDArray[np.uint8] = np.bitwise_or.reduce(self._pins[rows], axis=1)
        found: npt.NDArray[np.bool_] = pins != 0
        return found

    def holds(self, rows: Rows, stamps: U64, checks: U64) -> bool:
        """Whether these rows still hold, whole, what they held when these words were read."""
        return bool((self.stamps[rows] == stamps).all() and (self.checks[rows] == checks).all())

    def count(self) -> dict[int, int]:
        """Rows by state."""
        states = np.bincount((self.stamps & _STATE).astype(np.int64), minlength=3)
        return {FREE: int(states[FREE]), WRITING: int(states[WRITING]), READY: int(states[READY])}


def check_of(namespace: bytes, key: bytes, generation: int) -> int:
    """The checksum of whose chunk a row holds, in one use of it."""
    return int.from_bytes(blake3(namespace + generation.to_bytes(8, "little") + key).digest(8), "little")


def rows_of(numbers: Iterable[int]) -> Rows:
    return np.fromiter(numbers, np.intp)
