"""Two shared tiers behind each other, for one scheduler thread, as if they were one.

A lookup asks the tier above first and the one below for what it lacks. A load goes to the tier in which its chunk was
found. A store goes to the tier above, and what is idle there goes below (demotions.py). Each tier has all that a tier
has without the other: threads, deadlines, bounds, breakers, counters, announcements, and its own gate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spillway_connector.errors import TierError
from spillway_connector.plan.load_cost import JointGate, RateMeter
from spillway_connector.plan.sessions import SessionHint
from spillway_connector.tiers.tier import NO_TENANT, Clock
from spillway_connector.transfer.announcements import Announcement
from spillway_connector.transfer.demotions import Demotions
from spillway_connector.transfer.jobs import JobOutcome
from spillway_connector.transfer.lookups import Answers, Lookup
from spillway_connector.transfer.shared_tier import SharedTier
from spillway_connector.transfer.stats import Operation

FOUND_BELOW_MAX = 65_536  # chunks that the last lookup found below; any other is loaded from the tier above


@dataclass(slots=True)
class _Load:
    """A job that both tiers do a part of. parts: how many have not ended."""

    parts: int
    from_above: tuple[bytes, ...]
    from_below: tuple[bytes, ...]
    tenant: bytes
    done: list[bytes] = field(default_factory=list)
    failed: dict[bytes, TierError] = field(default_factory=dict)
    seconds: float = 0.0
    moved: int = 0


class TierChain:
    """``above`` and ``below`` as one tier; they share one ChangeLog of answered requests and one event of progress.

    All methods are called on the scheduler thread and return at once, except ``drain`` and ``close``.
    """

    def __init__(self, above: SharedTier, below: SharedTier, demotions: Demotions, *, clock: Clock) -> None:
        assert above.answered_requests is below.answered_requests
        self.answered_requests = above.answered_requests
        self.members = (above, below)
        self.not_worth = 0  # lookups that the tier below was not asked because loading from it does not pay
        self.demotions = demotions
        self._above, self._below = above, below
        self._clock = clock
        self._gate: tuple[JointGate, RateMeter, int] | None = None
        self._found_below: OrderedDict[bytes, None] = OrderedDict()
        self._loads: dict[int, _Load] = {}
        self._promoted: dict[int, tuple[bytes, ...]] = {}

    def use_gate(self, gate: JointGate, prefill_rate: RateMeter, chunk_bytes: int) -> None:
        """Ask and measure each tier by its own gate from now on. Without gates both are always asked."""
        self._gate = gate, prefill_rate, chunk_bytes

    def use_gate_of(self, other: TierChain) -> None:
        """Ask and measure by the gates of a chain whose place this one takes."""
        self._gate, self.not_worth = other._gate, other.not_worth

    # --- lookups ------------------------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether one of the tiers accepts lookups."""
        return self._above.open or self._below.open

    def lookup(self, key: bytes, request_id: str) -> Lookup:
        """See SharedTier.lookup."""
        return self.lookup_prefix((key,), request_id).found[0]

    def lookup_prefix(self, keys: Sequence[bytes], request_id: str) -> Answers:
        """Answer as SharedTier.lookup_prefix does, for both tiers. PENDING at most as long as both of them wait."""
        asked = self._asked(request_id)
        if len(asked) == 1:
            answers = asked[0].lookup_prefix(keys, request_id)
            self._note_places(asked[0], keys, answers)
            return answers
        found: list[Lookup] = []
        valid_until = float("inf")
        tier, other_missed = self._above, -1  # the place of the miss in the tier asked before
        while True:
            begin = len(found)
            answers = tier.lookup_prefix(keys[begin:] if begin else keys, request_id)
            self._note_places(tier, keys[begin:], answers)
            found += answers.found
            valid_until = min(valid_until, answers.valid_until)
            if found[-1] is not Lookup.MISS:
                return Answers(found, valid_until)
            missed = len(found) - 1
            if missed == other_missed:
                return Answers(found, valid_until)
            found.pop()
            tier, other_missed = (self._below if tier is self._above else self._above), missed

    def _asked(self, request_id: str) -> list[SharedTier]:
        if self._gate is None:
            return list(self.members)
        gate, prefill_rate, _ = self._gate
        numbers = gate.open_members(request_id, prefill_rate, self._clock())
        if 1 not in numbers:
            self.not_worth += 1
        return [self.members[number] for number in numbers]

    def _note_places(self, tier: SharedTier, keys: Sequence[bytes], answers: Answers) -> None:
        places, is_below = self._found_below, tier is self._below
        if not places and not is_below:
            return
        for key, answer in zip(keys, answers.found, strict=False):
            if answer is Lookup.HIT:
                places.pop(key, None)
                if is_below:
                    places[key] = None
        while len(places) > FOUND_BELOW_MAX:
            places.popitem(last=False)

    def count_request(self, keys: Sequence[bytes]) -> None:
        """See SharedTier.count_request."""
        self.demotions.use(keys)
        for tier in self.members:
            tier.count_request(keys)

    def begin_request_of_session(self, tenant: bytes, hint: SessionHint) -> None:
        """See SharedTier; a session counts for the tier whose order of eviction follows it."""
        for tier in self.members:
            tier.begin_request_of_session(tenant, hint)

    def use_session(self, tenant: bytes, hint: SessionHint, keys: Sequence[bytes]) -> None:
        """See SharedTier.use_session."""
        for tier in self.members:
            tier.use_session(tenant, hint, keys)

    def end_request_of_session(self, tenant: bytes, hint: SessionHint) -> None:
        """See SharedTier."""
        for tier in self.members:
            tier.end_request_of_session(tenant, hint)

    def retain(self, tenant: bytes, share: float, seconds: float, keys: Sequence[bytes]) -> None:
        """See SharedTier.retain; in each tier of its own room."""
        for tier in self.members:
            tier.retain(tenant, share, seconds, keys)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def submit_load(
        self, job_id: int, keys: Sequence[bytes], row_indices: Sequence[int], tenant: bytes = NO_TENANT
    ) -> None:
        """Fill the rows, each from the tier in which the last lookup found its chunk."""
        places = self._found_below
        from_below = [position for position, key in enumerate(keys) if key in places] if places else []
        below = set(from_below)
        from_above = [position for position in range(len(keys)) if position not in below]
        parts = [part for part in ((self._above, from_above), (self._below, from_below)) if part[1]]
        self._loads[job_id] = _Load(
            len(parts),
            tuple(keys[position] for position in from_above),
            tuple(keys[position] for position in from_below),
            tenant,
        )
        for tier, positions in parts:
            tier.submit_load(
                job_id, [keys[position] for position in positions], [row_indices[position] for position in positions]
            )

    def submit_store(
        self,
        job_id: int,
        keys: Sequence[bytes],
        row_indices: Sequence[int],
        tenant: bytes = NO_TENANT,
        session: SessionHint | None = None,
        *,
        hand_over: bool = False,
    ) -> None:
        """Write the rows to the tier above. See SharedTier.submit_store."""
        self._above.submit_store(job_id, keys, row_indices, tenant, session, hand_over=hand_over)
        below = self._below.known_present(keys)
        self.demotions.begin_store(job_id, [key for key in keys if key not in below], tenant)

    def finished(self) -> list[JobOutcome]:
        """See SharedTier.finished; a load ends with its last part."""
        ended = []
        for number, tier in enumerate(self.members):
            for outcome in tier.finished():
                load = self._loads.get(outcome.job_id) if outcome.operation is Operation.LOAD else None
                if load is None:
                    self.demotions.end_store(outcome.job_id, outcome.failed.keys())
                    ended.append(outcome)
                elif (whole := self._end_part(number, load, outcome)) is not None:
                    ended.append(whole)
        return ended

    def _end_part(self, number: int, load: _Load, part: JobOutcome) -> JobOutcome | None:
        if self._gate is not None:
            gate, _, chunk_bytes = self._gate
            if part.behind is not None:
                gate.members[number].given_up(*part.behind, self._clock())
            elif part.moved:
                gate.members[number].load_rate.add(part.moved * chunk_bytes, part.seconds, self._clock())
        load.parts -= 1
        load.done += part.done
        load.failed |= part.failed
        load.seconds = max(load.seconds, part.seconds)
        load.moved += part.moved
        if load.parts:
            return None
        del self._loads[part.job_id]
        self.demotions.add([key for key in load.from_above if key not in load.failed], load.tenant)
        if promoted := tuple(key for key in load.from_below if key not in load.failed):
            self._promoted[part.job_id] = promoted
        return JobOutcome(part.job_id, part.operation, tuple(load.done), load.failed, load.seconds, load.moved)

    def take_promoted(self, job_id: int) -> tuple[bytes, ...]:
        """The chunks of a load that has ended which the tier below gave, to be stored above; once."""
        return self._promoted.pop(job_id, ())

    def give_up_behind(self, seconds_per_chunk: float, spared: Callable[[int], bool]) -> None:
        """See SharedTier.give_up_behind."""
        for tier in self.members:
            tier.give_up_behind(seconds_per_chunk, spared)

    def arrived(self) -> list[tuple[int, list[bytes]]]:
        """See SharedTier.arrived."""
        return self._above.arrived() + self._below.arrived()

    def request_finished(self, request_id: str) -> None:
        """See SharedTier.request_finished."""
        for tier in self.members:
            tier.request_finished(request_id)

    @property
    def introduced(self) -> bool:
        """See SharedTier.introduced."""
        return all(tier.introduced for tier in self.members)

    def take_announcements(self) -> list[tuple[str, Announcement]]:
        """See SharedTier.take_announcements; with the name of the tier that each is about."""
        if stored := self.demotions.take_stored():
            self._below.stored_by_others(stored)
        return [each for tier in self.members for each in tier.take_announcements()]

    def step_end(self) -> None:
        """See SharedTier.step_end."""
        self.demotions.replace_stuck()
        for tier in self.members:
            tier.step_end()

    def has_work(self) -> bool:
        """Whether a job or a lookup is under way."""
        return any(tier.has_work() for tier in self.members)

    def weights_changed(self) -> None:
        """See SharedTier.weights_changed. Chunks of the former weights in the tier above are not demoted any more."""
        self.demotions.clear()
        for load in self._loads.values():
            load.from_above = ()
        for tier in self.members:
            tier.weights_changed()

    # --- the end ------------------------------------------------------------------------------------------------------

    def drain(self, timeout_seconds: float) -> bool:
        """See SharedTier.drain."""
        ended = [tier.drain(timeout_seconds) for tier in self.members]
        return all(ended)

    def wait_for_progress(self, timeout_seconds: float) -> bool:
        """See SharedTier.wait_for_progress: of either tier, since both report it by one event."""
        return self._above.wait_for_progress(timeout_seconds)

    def close(self, timeout_seconds: float = 5.0) -> None:
        """See SharedTier.close."""
        self.demotions.stop()
        for tier in self.members:
            tier.close(timeout_seconds / 2)
        self.demotions.join(1.0)
