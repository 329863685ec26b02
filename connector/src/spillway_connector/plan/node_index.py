"""The index of rows that the engines of a node share: which chunk is in which row, and who uses it.

It lies in memory that all of them map. The holder of one lock (node/region.py) changes it; a look-up reads it without
the lock. One word of each row, its stamp, holds the generation (a number that no other use of any row ever has) and the
state. Everything else that a change writes is written before the stamp. So if an engine is killed between two words,
each row is as it was before or as it was to be. The next holder of the lock counts again what is merely derived: the
number of free rows, and which segments have changed.

An engine reserves rows under the lock; while it lives, no other engine changes these. So it needs no lock to give them
to chunks, nor to publish the chunks once they are written. It counts such changes in its own words of the index.

Pure: no I/O, no lock, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from zlib import crc32

import numpy as np
import numpy.typing as npt

from spillway_connector.plan import node_records
from spillway_connector.plan.node_records import RECORD_BYTES, STATE_BITS, U64, USE_MASK, RowArray, Rows, RowWords

VERSION = 7
ENGINES_MAX = 64
IDENTITY_BYTES = 16
HEAD_BYTES = 64  # of the index, that tell whose it is
# The state of a row, in the low bits of its stamp. If the lowest bit is set, the row belongs to one engine alone.
FREE, WRITING, READY, RESERVED = 0, 1, 2, 3
NO_STAMP = (1 << 64) - 1  # no row ever has it: there is no such generation
DEAD_ROWS_KEPT_MS = 1000  # a copy that a killed engine's device had begun ends within it

_MAGIC = int.from_bytes(b"spillnod", "little")
_STATE_MASK = 3
_STATE = np.uint64(_STATE_MASK)
_OWNED = 1
_IS_OWNED = np.uint64(_OWNED)
RESERVED_TO_WRITING, WRITING_TO_READY = RESERVED ^ WRITING, WRITING ^ READY  # the bits of a stamp that change
_USE_AT, _USE = np.uint64(STATE_BITS), np.uint64(USE_MASK)
_NO_PINS = bytes(ENGINES_MAX)
_NO_HOLDS = bytes(4 * ENGINES_MAX)
_NO_ENGINE_HOLDS = bytes(8 * ENGINES_MAX)
_SEGMENT_BITS = 10  # rows of which one word says whether any has changed: 1,024
_HEADER_WORDS = 512
# In the header, three words for each place: the number of its engine, or 0; when that was found dead, or the place
# became free (ms); and until when it holds any row (s).
_ENGINES_FROM = 64
PLACE = Struct("=QQ")  # the first two of them
# Words of the header.
_MARK, _VERSION, _ROWS, _ROW_BYTES, _DIRTY, _GENERATION, _FREE_ROWS, SEARCHED, _IDENTITY = range(9)
# How often rows have changed: under the lock, and by the engine at each place, which claimed or published them. Each
# segment has this number of words, too.
_CHANGES_FROM, _CHANGE_WORDS = 256, 1 + ENGINES_MAX


class NodeIndex:
    """A view of the index in `memory`. Methods that change it are for the holder of the lock, between begin and end."""

    def __init__(self, memory: memoryview, num_rows: int) -> None:
        """memory: `bytes_of(num_rows)` bytes, writable."""
        self.num_rows = num_rows
        offset = 0

        def column(bytes_each: int, count: int = num_rows) -> memoryview:
            nonlocal offset
            start, size = offset, bytes_each * count
            offset += -(-size // 64) * 64
            return memory[start : start + size]

        # Words are read and written one by one, in a tenth of the time that an array takes for one; all of a column at
        # once as an array of the same memory.
        header = column(8, _HEADER_WORDS)
        stamps = column(8)
        used_ms = column(8)
        self._num_segments = (num_rows >> _SEGMENT_BITS) + 1
        segments = column(8, _CHANGE_WORDS * self._num_segments)
        self.records = node_records.NodeRecords(column(RECORD_BYTES), num_rows)
        self._owners = column(1)  # the engine that a row is reserved for, or that writes it
        self._pins = column(ENGINES_MAX)
        self._holds = column(4 * ENGINES_MAX)  # of each engine the second until which it holds the row
        self._words, self.stamps, self.used_ms = header.cast("Q"), stamps.cast("Q"), used_ms.cast("Q")
        self._segment_words = segments.cast("Q")
        self.stamp_array: U64 = np.frombuffer(stamps, np.uint64)
        self.used_ms_array: U64 = np.frombuffer(used_ms, np.uint64)
        self._segments: U64 = np.frombuffer(segments, np.uint64).reshape(_CHANGE_WORDS, self._num_segments)
        self.counts = self._words[_CHANGES_FROM : _CHANGES_FROM + _CHANGE_WORDS]
        self._owner_array = np.frombuffer(self._owners, np.uint8)
        self._pin_array = np.frombuffer(self._pins, np.uint8).reshape(num_rows, ENGINES_MAX)
        self._pin_words: U64 = self._pin_array.view(np.uint64)
        self._hold_words = self._holds.cast("I")
        self._hold_array = np.frombuffer(self._holds, np.uint32).reshape(num_rows, ENGINES_MAX)
        engines: U64 = np.frombuffer(header, np.uint64)[_ENGINES_FROM : _ENGINES_FROM + 3 * ENGINES_MAX]
        self._engines = engines.reshape(ENGINES_MAX, 3)
        self._held_until = self._words[_ENGINES_FROM + 2 : _ENGINES_FROM + 3 * ENGINES_MAX : 3]

    @classmethod
    def bytes_of(cls, num_rows: int) -> int:
        segments = _CHANGE_WORDS * ((num_rows >> _SEGMENT_BITS) + 1)
        a_row = 2 * 8 + RECORD_BYTES + 1 + ENGINES_MAX + 4 * ENGINES_MAX
        return _HEADER_WORDS * 8 + a_row * num_rows + 8 * segments + 8 * 64  # each column begins at a cache line

    def format(self, row_bytes: int, identity: bytes) -> None:
        """Begin an index in memory that is zero: every row is free. Its mark comes last.

        identity: IDENTITY_BYTES, of this index and no other one.
        """
        header = self._words
        header[_IDENTITY : _IDENTITY + IDENTITY_BYTES // 8] = memoryview(identity).cast("Q")
        header[_VERSION], header[_ROWS], header[_ROW_BYTES] = VERSION, self.num_rows, row_bytes
        header[_FREE_ROWS] = self.num_rows
        header[_MARK] = _MAGIC

    @staticmethod
    def explain_header(head: bytes, num_rows: int, row_bytes: int) -> str | None:
        """Return why an index that begins like this is not one of these rows, as half a sentence; None if it is."""
        words = np.frombuffer(head[: 4 * 8], np.uint64).tolist() if len(head) >= 4 * 8 else [0]
        if words[0] != _MAGIC:
            return "it was never finished"
        if words[1] != VERSION:
            return f"it has version {words[1]}, and this engine writes version {VERSION}"
        if words[2:4] != [num_rows, row_bytes]:
            return f"it has {words[2]} rows of {words[3]} bytes, and this engine is to have {num_rows} of {row_bytes}"
        return None

    @staticmethod
    def rows_in(head: bytes, row_bytes: int) -> int | None:
        """Count the rows of this size in an index of this version that begins like this; None if it is another."""
        words = np.frombuffer(head[: 4 * 8], np.uint64).tolist() if len(head) >= 4 * 8 else [0]
        return words[2] if words[:2] == [_MAGIC, VERSION] and words[3] == row_bytes else None

    # -- changes

    def begin(self) -> None:
        """The lock was taken: mend what a killed holder left."""
        if self._words[_DIRTY]:
            self._note_all()
            self._count_free()
        self._words[_DIRTY] = 1

    def end(self) -> None:
        self._words[_DIRTY] = 0

    def _count_free(self) -> None:
        self._words[_FREE_ROWS] = int(np.count_nonzero((self.stamp_array & _STATE) == FREE))

    def reserve(self, rows: Rows | RowArray, place: int) -> range:
        """The engine at `place` has these rows to itself, which are free or whose chunks leave. No engine has pinned
        them. Returns their stamps."""
        words, count = self._words, len(rows)
        first = words[_GENERATION] + 1 << STATE_BITS | RESERVED
        words[_GENERATION] += count
        reserved = range(first, first + (count << STATE_BITS), 1 << STATE_BITS)
        if self._any_holds():
            for row in filter(self._is_marked, rows):
                self._hold_array[row] = 0  # of the chunk before
        if len(rows) > node_records.FEW_ROWS:
            at = np.asarray(rows, np.intp)
            taken = count - int(np.count_nonzero(self.stamp_array[at] & _STATE))
            self._owner_array[at] = place
            self.stamp_array[at] = np.arange(reserved.start, reserved.stop, reserved.step, np.uint64)
        else:
            stamps, owners, taken = self.stamps, self._owners, 0
            for row, stamp in zip(rows, reserved, strict=True):
                taken += not stamps[row] & _STATE_MASK
                owners[row] = place
                stamps[row] = stamp
        words[_FREE_ROWS] -= taken
        self._note(rows)
        return reserved

    def claim(
        self, rows: Rows, known: RowWords, namespace: bytes, keys: Sequence[bytes], place: int, *, now_ms: int
    ) -> bool:
        """The engine at `place` is going to write these chunks to rows that it has reserved. Without the lock.

        known: learns of the claim. Its checksums are the words by which :meth:`holds` recognises the chunks. False if
        one of these rows is not as it was reserved: the index was cut, or the engine was taken for dead.
        """
        stamps, used_ms, memory, segments = self.stamps, self.used_ms, self.records.memory, self._segment_words
        reserved, seen, known_ms, checks = known.reserved, known.seen, known.used_ms, known.checks
        of_namespace, first, claimed = crc32(namespace), (1 + place) * self._num_segments, 0
        for row, key in zip(rows, keys, strict=True):
            if stamps[row] != (stamp := reserved[row]):
                break
            checks[row] = check = crc32(key, of_namespace) << 32 | stamp >> STATE_BITS & USE_MASK
            node_records.pack_record(memory, row * RECORD_BYTES, check, len(key), namespace, key)
            used_ms[row] = known_ms[row] = now_ms
            stamps[row] = seen[row] = stamp ^ RESERVED_TO_WRITING
            segments[first + (row >> _SEGMENT_BITS)] += 1
            claimed += 1
        self.counts[1 + place] += 1
        return claimed == len(rows)

    def claim_many(
        self, rows: RowArray, known: RowWords, namespace: bytes, keys: Sequence[bytes], place: int, *, now_ms: int
    ) -> bool:
        """Claim several rows as :meth:`claim` does."""
        reserved = known.reserved_array[rows]
        if (self.stamp_array[rows] != reserved).any():
            return False
        known.check_array[rows] = self.records.write_many(rows, reserved >> _USE_AT, namespace, keys)
        self.used_ms_array[rows] = known.used_array[rows] = now_ms
        self.stamp_array[rows] = known.seen_array[rows] = reserved ^ RESERVED_TO_WRITING
        self._note(rows, 1 + place)
        return True

    def publish(self, rows: Rows, known: RowWords, place: int) -> bool:
        """Publish the chunks that the engine at `place` has written. Without the lock.

        known: learns of the publication. The new stamps follow from those of the claim, because when they are read
        again, another engine may have given a row to another chunk. False if one of these rows is not as it was
        claimed: the index was cut, or the engine was taken for dead, and its place and rows may be another one's.
        """
        stamps, seen, segments, published = self.stamps, known.seen, self._segment_words, 0
        first = (1 + place) * self._num_segments
        for row in rows:
            if stamps[row] == (stamp := seen[row]):
                stamps[row] = seen[row] = stamp ^ WRITING_TO_READY
                segments[first + (row >> _SEGMENT_BITS)] += 1
                published += 1
        self.counts[1 + place] += 1
        return published == len(rows)

    def publish_many(self, rows: RowArray, known: RowWords, place: int) -> bool:
        """Publish several rows as :meth:`publish` does."""
        claimed = known.seen_array[rows]
        is_claimed = self.stamp_array[rows] == claimed
        are_all = bool(is_claimed.all())
        if not are_all:
            rows, claimed = rows[is_claimed], claimed[is_claimed]
        self.stamp_array[rows] = known.seen_array[rows] = claimed ^ WRITING_TO_READY
        self._note(rows, 1 + place)
        return are_all

    def free(self, rows: Rows) -> list[int]:
        """Mark these rows, which were in use, as free. Returns their stamps."""
        stamps = self.stamps
        freed: list[int] = []
        for row in rows:
            stamps[row] = stamp = stamps[row] & ~_STATE_MASK
            freed.append(stamp)
        self._words[_FREE_ROWS] += len(rows)
        self._note(rows)
        return freed

    def free_lost(self, rows: Rows, place: int) -> int:
        """Free those of these rows that no engine takes otherwise; see :meth:`lost`. Returns how many.

        rows: without those that the engine at `place` has reserved or writes. A row stays while another engine reads
        it, or while the engine that its record names may still write to it because it has not ended.
        """
        freed: list[int] = []
        for row in rows:
            owner = self._owners[row]
            is_anothers = owner != place and owner < ENGINES_MAX and self._engines[owner, 0]
            is_lost = self.stamps[row] & _OWNED or self.entry(row) is None
            if is_lost and not is_anothers and not self.is_pinned(row):
                self.stamps[row] &= ~_STATE_MASK
                freed.append(row)
        if freed:
            self._count_free()
            self._note(freed)
        return len(freed)

    def unpin(self, rows: Rows | RowArray, place: int) -> None:
        """The same engine reads them no longer. The caller needs no lock, as the change only allows more."""
        self.pin(rows, place, 0)

    def pin(self, rows: Rows | RowArray, place: int, value: int = 1) -> None:
        """The engine at `place` reads these rows: they are not to be freed."""
        if isinstance(rows, np.ndarray):
            self._pin_array[rows, place] = value
        else:
            pins = self._pins[place::ENGINES_MAX]
            for row in rows:
                pins[row] = value

    def hold(self, rows: Rows, place: int, until_s: int) -> None:
        """Clients of the engine at `place` asked to retain what is in these rows until this second; 0: no longer.

        The caller needs no lock, as only the order of eviction depends on it.
        """
        self._engines[place, 2] = max(int(self._engines[place, 2]), until_s)  # first, or a kill leaves holds behind
        for row in rows:
            self._hold_words[row * ENGINES_MAX + place] = until_s

    def end_holds(self, place: int) -> None:
        """The engine at `place` holds nothing any more."""
        if self._engines[place, 2]:
            self._hold_array[:, place] = 0
            self._engines[place, 2] = 0

    def take_free(self, count: int) -> list[int]:
        """Take up to `count` free rows. The search continues after the last one, so rows often lie side by side."""
        found: list[int] = []
        first = row = self._words[SEARCHED]
        while len(found) < count and row < self.num_rows and not self.stamps[row] & _STATE_MASK:  # the usual case
            found.append(row)
            row += 1
        while len(found) < count:
            start = row % self.num_rows
            end = min((start >> _SEGMENT_BITS) + 1 << _SEGMENT_BITS, self.num_rows)
            if row >= self.num_rows:
                end = min(end, first)
            is_free = (self.stamp_array[start:end] & _STATE) == FREE
            found += (np.flatnonzero(is_free)[: count - len(found)] + start).tolist()
            row += end - start
            if row >= first + self.num_rows:
                break
        self._words[SEARCHED] = (found[-1] + 1 if found else row) % self.num_rows
        return found

    def _note(self, rows: Rows | RowArray, column: int = 0) -> None:
        """column: 0, or the column of the engine that claimed or published the rows."""
        first, words, bits = column * self._num_segments, self._segment_words, _SEGMENT_BITS
        for segment in set((rows >> bits).tolist()) if isinstance(rows, np.ndarray) else [row >> bits for row in rows]:
            words[first + segment] += 1
        self.counts[column] += 1

    def _note_all(self) -> None:
        self._segments[0] += np.uint64(1)
        self.counts[0] += 1

    # -- engines

    def join(self, number: int) -> int | None:
        """A place for an engine; None if all are taken.

        The one that has been free for the longest: an engine that was taken for dead may still write its words.
        """
        free = np.flatnonzero(self._engines[:, 0] == 0)
        if not len(free):
            return None
        place = int(free[self._engines[free, 1].argmin()])
        self._pin_array[:, place] = 0
        self.end_holds(place)
        self._engines[place] = number, 0, 0
        return place

    def place_words(self, place: int) -> memoryview:
        """The words of a place that stay as they are until another engine takes the one there for dead."""
        return self._words[_ENGINES_FROM + 3 * place : _ENGINES_FROM + 3 * place + 2]

    def sweep(self, is_held: Callable[[int], bool], own: int | None, now_ms: int) -> int:
        """Release what killed engines had claimed. Returns how many rows.

        is_held: whether a process of the engine of that number still runs. Rows that such an engine read are released
        at once, rows that it was writing or had reserved DEAD_ROWS_KEPT_MS later.
        """
        released = 0
        for place in np.flatnonzero(self._engines[:, 0]).tolist():
            number, dead_ms, _ = self._engines[place].tolist()
            if place == own or (not dead_ms and is_held(number)):
                continue
            if not dead_ms:
                self._pin_array[:, place] = 0
                self.end_holds(place)
                self._engines[place, 1] = max(now_ms, 1)
                self._note_all()  # it may have been killed within a claim or a publication
            elif abs(now_ms - dead_ms) >= DEAD_ROWS_KEPT_MS:
                left = self.owned_by(place)
                if left:
                    self.free(left)
                self._engines[place] = 0, max(now_ms, 1), 0
                released += len(left)
        return released

    def owned_by(self, place: int) -> list[int]:
        """The rows that the engine at `place` has reserved, or claimed and not published."""
        found: list[int] = np.flatnonzero(((self.stamp_array & _IS_OWNED) != 0) & (self._owner_array == place)).tolist()
        return found

    @property
    def has_dead_engines(self) -> bool:
        """Whether a sweep has found dead engines, whose places will be free."""
        return bool(self._engines[self._engines[:, 0] != 0, 1].any())

    def engines(self) -> int:
        """Number of engines that have a place."""
        return len(self.numbers())

    def numbers(self) -> frozenset[int]:
        """Return the numbers of the engines that have a place."""
        return frozenset(self._engines[:, 0].tolist()) - {0}

    # -- looks, without the lock

    @property
    def free_rows(self) -> int:
        return self._words[_FREE_ROWS]

    @property
    def identity(self) -> bytes:
        return self._words[_IDENTITY : _IDENTITY + IDENTITY_BYTES // 8].tobytes()

    @property
    def generation(self) -> int:
        """The latest generation of all rows."""
        return self._words[_GENERATION]

    def new_segments(self) -> U64:
        """Return the state before the first call of :meth:`changed_rows`: everything has changed."""
        return np.full(self._segments.shape, np.iinfo(np.uint64).max, np.uint64)

    def changed_rows(self, seen: U64, segments: U64) -> list[int]:
        """The rows whose stamps are not those in `seen`. segments: brought up to date here; `seen` by the caller."""
        latest = self._segments.copy()  # before the stamps are read
        moved = np.flatnonzero((latest != segments).any(axis=0))
        segments[:] = latest
        found: list[int] = []
        for start in (moved << _SEGMENT_BITS).tolist():
            end = start + (1 << _SEGMENT_BITS)
            found += (np.flatnonzero(self.stamp_array[start:end] != seen[start:end]) + start).tolist()
        return found

    def entry(self, row: int) -> node_records.Entry | None:
        """Return the content of a row; None: it is changing at this moment or damaged."""
        stamp = self.stamps[row]
        if stamp & _STATE_MASK in (FREE, RESERVED):
            return node_records.Entry(stamp)
        found = self.records.read(row, stamp)
        return found if self.stamps[row] == stamp else None

    def lost(self, place: int) -> list[int]:
        """Rows whose stamps and records are of different uses, and those that are reserved or being written for no
        engine, or for the one at `place`, which knows its own. One that is changing at this moment may be among them.

        If engines follow the rules of this module, no order of events leaves such a row.
        """
        stamps, is_nobodys = self.stamp_array.copy(), self._engines[:, 0] == 0
        is_nobodys[place] = True
        is_owned = (stamps & _IS_OWNED) != 0
        has_chunk = ((stamps & _STATE) == WRITING) | ((stamps & _STATE) == READY)
        is_damaged = has_chunk & (((stamps >> _USE_AT) ^ self.records.checks) & _USE != 0)
        found: list[int] = np.flatnonzero(is_damaged | is_owned & is_nobodys[self._owner_array % ENGINES_MAX]).tolist()
        return found

    def is_pinned(self, row: int) -> bool:
        """Whether any engine reads the row."""
        return self._pins[row * ENGINES_MAX : (row + 1) * ENGINES_MAX].tobytes() != _NO_PINS

    def may_leave(self, row: int) -> bool:
        """Whether the row holds a chunk that no engine reads. Asked under the lock, it stays so, whatever the asking
        engine took the row for."""
        return self.stamps[row] & _STATE_MASK == READY and not self.is_pinned(row)

    def all_may_leave(self, rows: RowArray) -> bool:
        return bool(((self.stamp_array[rows] & _STATE) == READY).all()) and not self._pin_words.take(rows, 0).any()

    def which_may_leave(self, rows: RowArray) -> npt.NDArray[np.bool_]:
        """Whether each row holds a chunk that no engine reads, as :meth:`may_leave`."""
        may: npt.NDArray[np.bool_] = ((self.stamp_array[rows] & _STATE) == READY) & ~self._pin_words[rows].any(1)
        return may

    def used_since(self, rows: Rows, used_ms: U64) -> list[int]:
        """Return the rows that were used later than these words of all rows show."""
        at = np.array(rows, np.intp)
        later: list[int] = at[self.used_ms_array[at] > used_ms[at]].tolist()
        return later

    def any_held(self, now_s: float) -> bool:
        """Whether an engine holds any row. An engine that holds nothing but what has left may be counted, too."""
        return self._any_holds() and bool((self._engines[:, 2] > now_s).any())

    def _any_holds(self) -> bool:
        return self._held_until.tobytes() != _NO_ENGINE_HOLDS

    def is_held(self, row: int, now_s: float) -> bool:
        """Whether clients of any engine asked to retain what is in the row."""
        return self._is_marked(row) and int(self._hold_array[row].max()) > now_s

    def _is_marked(self, row: int) -> bool:
        return self._holds[row * 4 * ENGINES_MAX : (row + 1) * 4 * ENGINES_MAX].tobytes() != _NO_HOLDS

    def ready_words(self, rows: RowArray) -> tuple[U64, U64] | None:
        """The stamps of these rows and the words beside them, by which :meth:`holds` recognises what they hold; None
        if not all of them hold a chunk."""
        stamps = self.stamp_array[rows]
        return (stamps, self.records.checks[rows]) if ((stamps & _STATE) == READY).all() else None

    def holds(self, rows: RowArray, stamps: U64, checks: U64) -> bool:
        """Whether these rows still hold, whole, what they held when these words were read."""
        return bool((self.stamp_array[rows] == stamps).all() and (self.records.checks[rows] == checks).all())

    def count(self) -> dict[int, int]:
        """Return the number of rows by state."""
        states = np.bincount((self.stamp_array & _STATE).astype(np.intp), minlength=4)
        return dict(enumerate(states.tolist()))

    def count_namespaces(self) -> dict[bytes, int]:
        """Rows with a chunk by namespace, as of about now."""
        states = self.stamp_array & _STATE
        used = self.records.namespaces[(states == WRITING) | (states == READY)]
        found, counts = np.unique(used, axis=0, return_counts=True)
        return {each.tobytes(): count for each, count in zip(found, counts.tolist(), strict=True)}
