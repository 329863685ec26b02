"""Choice of the entry that leaves a full size class if sessions say when they come back: the policy's order, with
changes.

As in the CPU tier (plan/retention.py): the size class's policy decides whose turn it is to give up an entry, and a
session that is expected back only changes which entry of the same tenant that is.

- Entries that only an ended session used go first.
- Where the policy's victim belongs to a session that is expected back, the last chunk of the tenant's session that
  comes back last leaves in its place, and the victim counts as used.
- A chunk that was requested once and is stored only because its session comes back (``own_room``) takes the place of
  one of the same tenant that is used later, or is not stored.
- An entry that several sessions use, or have used, leaves only in its own turn.

Sessions and what they use are in arrays that all processes of the node share (session_file.py), so each evicts by what
all of them know. A row belongs to one session at a time; its number changes with the session, and a slot names its
session by that number, and its own generation. So whatever is stale, torn or damaged there is no session's, and a
wrong entry changes the order and nothing else.

Pure: reads the given arrays and changes them through ``put``, without clock, lock or file. Times are whole seconds.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spillway_connector.plan.sessions import expected_at
from spillway_connector.tiers.disk.slab.layout import SESSION_ROWS_MAX
from spillway_connector.tiers.disk.slab.policy import LIVE, Put

NO_SESSION = 0  # no session is known to use the slot
SEVERAL = 0xFFFFFFFF
UNKNOWN = 0xFFFFFFFF  # when a session comes back; or that it cannot be late
NO_PLACE = 0xFFFFFFFF  # in the prefix: known when the request that stored the chunk ends
REPLAN_SECONDS = 10  # a plan is made again after this long at the latest, as sessions become late
_ROW_BITS = SESSION_ROWS_MAX.bit_length() - 1
_LIVES_MAX = (1 << 32 - _ROW_BITS) - 1  # of a row; the last would make a number that means SEVERAL

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class SessionArrays:
    """row_*: one element per session. row_number: 0 if the row is free. slot_*: one element per slot of the size class.
    row_changes: of shape (1,), grows with every change of a row."""

    row_tag: U64
    row_tenant: U64
    row_number: U32
    row_due_s: U32
    row_late_s: U32
    row_used_s: U32
    row_ended: npt.NDArray[np.uint8]
    row_changes: U64
    slot_generation: U32
    slot_session: U32
    slot_place: U32


@dataclass(frozen=True, slots=True)
class EntryArrays:
    """The size class's entries, one element per slot. tenant, generation and order: as in the index."""

    state: npt.NDArray[np.uint8]
    tenant: U64
    generation: U32
    order: U64


@dataclass(slots=True)
class _Plan:
    """The findings of one pass over the arrays; checked at use."""

    made_s: int
    version: int
    held: npt.NDArray[np.int64]  # by row: entries that are its session's alone
    numbers: U32
    due_s: U32
    ended: list[int]  # rows of ended sessions that hold entries, the first one to end first
    expected: dict[int, list[int]]  # by tenant: rows that are expected back, the last one first
    slots: dict[int, deque[int]]  # by row: its entries, the end of the prefix first


class SessionOrder:
    """The sessions of a size class. The arrays hold all there is to know; the only state here is a plan, checked at
    use.

    All methods are called under the lock that the arrays' changes are made under.
    """

    def __init__(self, arrays: SessionArrays, entries: EntryArrays, put: Put) -> None:
        self._arrays = arrays
        self._entries = entries
        self._put = put
        self._rows = len(arrays.row_number)  # a power of two
        self._plan: _Plan | None = None

    # --- what sessions say ------------------------------------------------------------------------------------------

    def find(self, tenant: int, tag: int) -> int | None:
        """Return the row of a session."""
        arrays = self._arrays
        rows = np.flatnonzero((arrays.row_tag == np.uint64(tag)) & (arrays.row_number != 0))
        for row in rows.tolist():
            if int(arrays.row_tenant[row]) == tenant:
                return int(row)
        return None

    def use(self, tenant: int, tag: int, *, ended: bool, due_s: int | None, late_s: int | None, now_s: int) -> int:
        """Note when a session comes back, or that it has ended; its row."""
        row = self.find(tenant, tag)
        put = self._put
        if row is None:
            row = self._free_row(tenant)
            life = (int(self._arrays.row_number[row]) >> _ROW_BITS) % (_LIVES_MAX - 1) + 1
            put("row_number", row, 0)
            put("row_tag", row, tag)
            put("row_tenant", row, tenant)
            self._put_times(row, ended, due_s, late_s, now_s)
            put("row_number", row, life << _ROW_BITS | row)
        else:
            self._put_times(row, ended, due_s, late_s, now_s)
        put("row_changes", 0, int(self._arrays.row_changes[0]) + 1)
        return row

    def claimed(self, row: int, slot: int) -> None:
        """A chunk of this row's session is written to the slot, which no other entry is in any more."""
        put = self._put
        put("slot_session", slot, NO_SESSION)
        put("slot_place", slot, NO_PLACE)
        put("slot_generation", slot, int(self._entries.generation[slot]))
        put("slot_session", slot, int(self._arrays.row_number[row]))

    def own(self, row: int, slots: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> None:
        """The session of this row uses the entries in these slots; places: of their chunks in its prefix."""
        arrays, entries, put = self._arrays, self._entries, self._put
        number = int(arrays.row_number[row])
        known = arrays.slot_generation[slots] == entries.generation[slots]
        current = np.where(known, arrays.slot_session[slots], NO_SESSION)
        right = (current == number) & (arrays.slot_place[slots] == places)
        # An entry of another tenant is damage: the tenant's salt is in the key.
        changed = ~right & (current != SEVERAL) & (entries.tenant[slots] == arrays.row_tenant[row])
        for slot, place in zip(slots[changed].tolist(), places[changed].tolist(), strict=True):
            other = self._row_of(slot)
            alone = other is None or other == row
            put("slot_session", slot, NO_SESSION)
            put("slot_place", slot, place)
            put("slot_generation", slot, int(entries.generation[slot]))
            put("slot_session", slot, number if alone else SEVERAL)

    def use_without_session(self, slot: int) -> None:
        """A request that names no session uses the entry: it is not left over from one that ended."""
        row = self._row_of(slot)
        if row is not None and self._arrays.row_ended[row]:
            self._put("slot_session", slot, NO_SESSION)

    def share(self, slot: int) -> None:
        """The entry leaves in its own turn alone, whatever its session says."""
        if self._row_of(slot) is not None:
            self._put("slot_session", slot, SEVERAL)

    # --- what leaves ------------------------------------------------------------------------------------------------

    def ended_entry(self, now_s: int, tenant: int | None = None) -> int | None:
        """An entry that only an ended session used, of this tenant if one is given; it counts as gone."""
        plan, arrays = self._planned(now_s), self._arrays
        empty = []
        found = None
        for row in plan.ended:
            if tenant is not None and int(arrays.row_tenant[row]) != tenant:
                continue
            if arrays.row_number[row] == plan.numbers[row] and arrays.row_ended[row]:
                found = self._next_slot(plan, row)
                if found is not None:
                    break
            empty.append(row)
        if empty:
            plan.ended = [row for row in plan.ended if row not in empty]
        return found

    def is_expected(self, slot: int, now_s: int) -> bool:
        """Whether the entry belongs to one session, which is expected back."""
        row = self._row_of(slot)
        return row is not None and not self._arrays.row_ended[row] and self._due_of(row, now_s) < math.inf

    def in_place_of(self, slot: int, now_s: int, asking: int | None) -> int:
        """The entry that leaves in place of this one: the slot itself, or the last chunk of the same tenant's session
        that comes back last. asking: the row of the session that the room is for, which gives up none of its own."""
        if not self.is_expected(slot, now_s):
            return slot
        other = self._last(int(self._entries.tenant[slot]), -math.inf, now_s, asking)
        return slot if other is None else other

    def own_room(self, row: int, now_s: int) -> int | None:
        """An entry of the same tenant that is used later than those of this row's session; None if none is."""
        due = self._due_of(row, now_s)
        tenant = int(self._arrays.row_tenant[row])
        ended = self.ended_entry(now_s, tenant)
        return ended if ended is not None or due == math.inf else self._last(tenant, due, now_s, row)

    # --- the rest ---------------------------------------------------------------------------------------------------

    def _put_times(self, row: int, ended: bool, due_s: int | None, late_s: int | None, now_s: int) -> None:
        self._put("row_due_s", row, UNKNOWN if due_s is None else min(due_s, UNKNOWN - 1))
        self._put("row_late_s", row, UNKNOWN if late_s is None else min(late_s, UNKNOWN - 1))
        self._put("row_used_s", row, now_s)
        self._put("row_ended", row, ended)

    def _free_row(self, tenant: int) -> int:
        """Takes a free row, else the least recently used one of ended sessions, else that of the tenant with the most
        rows."""
        arrays = self._arrays
        free = np.flatnonzero(arrays.row_number == 0)
        if len(free):
            return int(free[0])
        rows = np.flatnonzero(arrays.row_ended)
        if not len(rows):
            tenants, counts = np.unique(arrays.row_tenant, return_counts=True)
            most = tenants[counts == counts.max()]
            crowded = np.uint64(tenant) if np.uint64(tenant) in most else most[0]
            rows = np.flatnonzero(arrays.row_tenant == crowded)
        return int(rows[arrays.row_used_s[rows].argmin()])

    def _row_of(self, slot: int) -> int | None:
        """The row of the session that alone uses the entry in a slot."""
        arrays, entries = self._arrays, self._entries
        number = int(arrays.slot_session[slot])
        row = number & self._rows - 1
        if (
            number == NO_SESSION
            or int(arrays.row_number[row]) != number
            or arrays.slot_generation[slot] != entries.generation[slot]
            or arrays.row_tenant[row] != entries.tenant[slot]
        ):
            return None
        return row

    def _due_of(self, row: int, now_s: int) -> float:
        """Return when the session comes back; infinity: never, or the time is unknown."""
        due_s, late_s = int(self._arrays.row_due_s[row]), int(self._arrays.row_late_s[row])
        return math.inf if due_s == UNKNOWN else expected_at(due_s, math.inf if late_s == UNKNOWN else late_s, now_s)

    def _last(self, tenant: int, after: float, now_s: int, asking: int | None) -> int | None:
        """The last chunk of the tenant's session that comes back last, and later than ``after``; it counts as gone."""
        plan = self._planned(now_s)
        slot = self._last_planned(plan, tenant, after, now_s, asking)
        if slot is None and plan.made_s != now_s:
            self._plan = None
            slot = self._last_planned(self._planned(now_s), tenant, after, now_s, asking)
        return slot

    def _last_planned(self, plan: _Plan, tenant: int, after: float, now_s: int, asking: int | None) -> int | None:
        arrays = self._arrays
        rows = plan.expected.get(tenant)
        if rows is None:
            rows = plan.expected[tenant] = self._last_first(plan, tenant)
        gone = []
        found = None
        for row in rows:
            if row == asking:
                continue
            if arrays.row_number[row] == plan.numbers[row] and arrays.row_due_s[row] == plan.due_s[row]:
                if self._due_of(row, now_s) <= after:
                    break
                found = self._next_slot(plan, row)
                if found is not None:
                    break
            gone.append(row)  # it has no more entries, or it came back: where it stands now, the next plan says
        if gone:
            plan.expected[tenant] = [row for row in rows if row not in gone]
        return found

    def _next_slot(self, plan: _Plan, row: int) -> int | None:
        """The next entry that a session gives up; it counts as gone."""
        slots = plan.slots.get(row)
        if slots is None:
            slots = plan.slots[row] = deque(self._slots_of(row))
        while slots:
            slot = slots.popleft()
            if self._row_of(slot) == row and self._entries.state[slot] == LIVE:
                return slot
        return None

    def _planned(self, now_s: int) -> _Plan:
        plan, version = self._plan, int(self._arrays.row_changes[0])
        age = math.inf if plan is None else abs(now_s - plan.made_s)
        if plan is None or age >= REPLAN_SECONDS or (age and plan.version != version):
            plan = self._plan = self._make_plan(now_s, version)
        return plan

    def _make_plan(self, now_s: int, version: int) -> _Plan:
        arrays, entries = self._arrays, self._entries
        rows = arrays.slot_session & np.uint32(self._rows - 1)
        numbers = arrays.row_number.copy()
        mine = (arrays.slot_session != NO_SESSION) & (numbers[rows] == arrays.slot_session)
        mine &= (arrays.slot_generation == entries.generation) & (entries.state == LIVE)
        held = np.bincount(rows[mine], minlength=self._rows)
        ended = np.flatnonzero((arrays.row_ended != 0) & (numbers != 0) & (held > 0))
        first_ended = ended[np.argsort(arrays.row_used_s[ended], kind="stable")].tolist()
        return _Plan(now_s, version, held, numbers, arrays.row_due_s.copy(), first_ended, {}, {})

    def _last_first(self, plan: _Plan, tenant: int) -> list[int]:
        """Rows of the tenant that hold entries and are expected back, the last one first; late ones before all."""
        arrays = self._arrays
        expected = (plan.numbers != 0) & (plan.held > 0) & (arrays.row_ended == 0) & (plan.due_s != UNKNOWN)
        rows = np.flatnonzero(expected & (arrays.row_tenant == np.uint64(tenant)))
        return sorted(rows.tolist(), key=lambda row: -self._due_of(row, plan.made_s))

    def _slots_of(self, row: int) -> list[int]:
        """Entries that are the session's alone, the end of its prefix first; places not known yet before all."""
        arrays, entries = self._arrays, self._entries
        slots = np.flatnonzero(arrays.slot_session == arrays.row_number[row])
        slots = slots[(arrays.slot_generation[slots] == entries.generation[slots]) & (entries.state[slots] == LIVE)]
        ordered: list[int] = slots[np.lexsort((entries.order[slots], arrays.slot_place[slots]))][::-1].tolist()
        return ordered
