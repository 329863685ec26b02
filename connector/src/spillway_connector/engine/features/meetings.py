"""Prompts that are computed from their front while the end of their prefix is loaded (compute_while_loading: on).

vLLM takes loaded tokens only behind computed ones, and only when it admits a request. So the end of the prefix is first
promoted from the shared tier to the CPU tier, from its last chunk backwards, while vLLM computes the prompt from its
first. When everything behind the computed part is in the CPU tier, the request is preempted: its computed blocks stay
in the device's prefix cache, and vLLM admits it again at once with those as its own hit and the rest as a load, on
the same path as any other request. What is lost in between (a block of the device's cache, a row) is computed.

A preemption in the middle of a prefill discards nothing else: no token has been sampled, and a step that was sent with
the request writes to blocks that every later load waits for. If the tier stalls, the prompt is computed to its end,
and has lost one wait of HOLD_SECONDS_MAX at most.

Each generation of vLLM bounds a step and preempts a request in its own way (SchedulerControl).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from typing_extensions import override
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.request import Request, RequestStatus

from spillway_connector.engine.features.feature import SteeringFeature, steering
from spillway_connector.engine.manager.tiering import TieringManager
from spillway_connector.plan.load_cost import PrefillTimer
from spillway_connector.plan.meeting import (
    HOLD_SECONDS_MAX,
    MeetingOutcome,
    Rates,
    job_chunks_max,
    meeting_pays,
    meeting_point,
    step_tokens_max,
)

_LOOKUP_SECONDS_MAX = 0.05  # a request that could be computed at once waits no longer for what is stored of it


@dataclass(slots=True)
class Meeting:
    """A prefix that is computed from its first chunk onwards and loaded from its last stored chunk backwards.

    Attributes:
        keys: The request's chunks, up to the last stored one.
        begin: The position of the first chunk that is computed.
        loaded_from: All chunks from this position on are in the CPU tier.
        asked_from: All chunks from this position on are in the CPU tier or are being read.
        job_chunks: The size of the last load job.
        no_more: No further chunk will be loaded, because rows are short or a chunk was lost.
    """

    request: Request
    context: ReqContext
    keys: list[OffloadKey]
    begin: int
    loaded_from: int
    asked_from: int
    job_chunks: int = 0
    job_begun_at: float = 0.0
    no_more: bool = False
    hold_until: float | None = None


@dataclass(slots=True)
class _Jump:
    """A preempted request that waits to be admitted again.

    Attributes:
        local_tokens: What vLLM had counted as cached on the device before.
        external_tokens: What vLLM had counted as loaded before.
        loaded_tokens: What the request loads when it is admitted again.
    """

    request: Request
    local_tokens: int
    external_tokens: int
    loaded_tokens: int = 0


class SchedulerControl(ABC):
    """The operations of a meeting on the scheduler of one generation of vLLM; they run on the scheduler's thread."""

    @abstractmethod
    def bounded(self, scheduler: Scheduler, tokens: Mapping[str, int]) -> AbstractContextManager[None]:
        """Return a context within which a step computes at most these numbers of tokens, by request id.

        The caller names at least one request. Leaving the context restores the scheduler.
        """

    @abstractmethod
    def has_room(self, scheduler: Scheduler) -> bool:
        """Whether the device has blocks for the rest of every prompt that is being computed, and vLLM would give blocks
        to such a prompt after a preemption."""

    @abstractmethod
    def preempt(self, scheduler: Scheduler, request: Request) -> None:
        """Preempt a running request that has sampled nothing, and put it first in the queue."""


class Meetings(SteeringFeature):
    """The meetings of one engine. EngineCore process, scheduler thread; no method blocks.

    Attributes:
        jumps: The number of requests that have met their load so far.
    """

    def __init__(
        self,
        manager: TieringManager,
        control: SchedulerControl,
        timer: PrefillTimer,
        chunk_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.jumps = 0
        self._clock = clock
        self._manager = manager
        self._control = control
        self._timer = timer
        self._chunk_tokens = chunk_tokens
        self._steered = False  # vLLM's scheduler asks before each step
        self._asked_at: dict[str, float] = {}  # requests whose prefix is being looked up
        self._candidates: set[str] = set()  # requests that may meet their load
        self._judged: set[str] = set()
        self._meetings: dict[str, Meeting] = {}
        self._jumped: dict[str, _Jump] = {}

    @property
    def idle(self) -> bool:
        return not (self._asked_at or self._judged or self._meetings or self._jumped or self._candidates)

    # -- a waiting request

    def consider(self, request: Request) -> None:
        """Decide before the lookup whether the request may be computed while it is loaded."""
        if request.request_id in self._judged or not self._steered or not _is_plain(request):
            return
        rates = self._manager.rates()
        if rates is None or not self._manager.is_slower_than_computing():
            return
        if meeting_pays(0, request.num_tokens // self._chunk_tokens, rates):
            self._candidates.add(request.request_id)
            self._manager.forbid_probing(request.request_id)

    def keeps_waiting(
        self, request: Request, context: ReqContext, keys: list[OffloadKey], computed_tokens: int
    ) -> bool:
        """Decide after the lookup whether vLLM is to ask again before it computes the rest of the prompt.

        Args:
            keys: The keys of all whole chunks of the request.
            computed_tokens: What the lookup has found, on the device and in the CPU tier.
        """
        request_id = request.request_id
        if request_id not in self._candidates or request_id in self._judged:
            return False
        now = self._clock()
        begin = computed_tokens // self._chunk_tokens
        rates = self._manager.rates()
        pays = rates is not None and self._manager.is_slower_than_computing() and meeting_pays(begin, len(keys), rates)
        stored = self._manager.stored_chunks(keys[begin:], context) if pays else 0
        if stored is None and now < self._asked_at.setdefault(request_id, now) + _LOOKUP_SECONDS_MAX:
            return True
        self._judged.add(request_id)
        self._asked_at.pop(request_id, None)
        end = begin + (stored or 0)
        if rates is None or not meeting_pays(begin, end, rates):
            return False
        meeting = Meeting(request, context, keys[:end], begin, loaded_from=end, asked_from=end)
        self._promote(meeting, meeting_point(begin, end, rates), rates)
        if meeting.asked_from == end:
            return False
        self._meetings[request_id] = meeting
        self._manager.count_meeting(MeetingOutcome.PLANNED)
        return True  # its first step must not go too far: `schedule` bounds it

    @override
    def ended(self, request_id: str) -> None:
        """Forget the request. Chunks that are being read for it may still reach the CPU tier."""
        if request_id in self._meetings:
            self._abandon(request_id)
        self._jumped.pop(request_id, None)
        self._asked_at.pop(request_id, None)
        self._judged.discard(request_id)
        self._candidates.discard(request_id)
        self._manager.allow_probing(request_id)

    @override
    def tier_was_reset(self) -> None:
        """Abandon all meetings. Their requests are computed to the end."""
        for request_id in list(self._meetings):
            self._abandon(request_id)

    @override
    def admitted(self, request_id: str, loaded_tokens: int) -> None:
        if (jump := self._jumped.get(request_id)) is not None:
            jump.loaded_tokens = loaded_tokens

    def _abandon(self, request_id: str) -> None:
        del self._meetings[request_id]
        self._manager.count_meeting(MeetingOutcome.ABANDONED)

    # -- a step

    @override
    def schedule(self, scheduler: Scheduler, plan: Callable[[], SchedulerOutput]) -> SchedulerOutput:
        """Advance the meetings, then plan."""
        self._steered = True
        if not self._meetings and not self._jumped:
            return plan()
        limits = {meeting.request.request_id: self._steer(scheduler, meeting) for meeting in [*self._meetings.values()]}
        bounds = {request_id: tokens for request_id, tokens in limits.items() if tokens is not None}
        if bounds:
            with self._control.bounded(scheduler, bounds):
                output = plan()
        else:
            output = plan()
        if self._jumped:
            self._count_computed_as_computed()
        return output

    def _steer(self, scheduler: Scheduler, meeting: Meeting) -> int | None:
        """Advance one meeting. Returns how many tokens the request's next step may compute; None means any number."""
        request, chunk_tokens = meeting.request, self._chunk_tokens
        running = request.status is RequestStatus.RUNNING
        waiting = request.status in (RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KVS)
        position = max(request.num_computed_tokens, meeting.begin * chunk_tokens)
        first, end = position // chunk_tokens, len(meeting.keys)
        rates = self._manager.rates()
        if rates is None or first >= end or not (running or waiting) or not _is_in_prefill(request):
            self._abandon(request.request_id)
            return None
        if self._manager.step is None:
            self._manager.begin_step()  # takes in what has been loaded since the last step
        self._take_in(meeting, first)
        if meeting.loaded_from <= first and running:
            self._end(scheduler, meeting, first)
            return None
        busy = self._timer.tokens_under_way / (rates.computed * chunk_tokens)
        coming = self._missing(meeting.keys[meeting.asked_from : meeting.loaded_from])
        unseen = self._unseen_seconds(meeting, coming, rates)
        meet = meeting_point(position / chunk_tokens, meeting.loaded_from, rates, busy + unseen)
        if not meeting.no_more and coming * 4 <= meeting.job_chunks:
            self._promote(meeting, meet, rates)
        if meeting.no_more:
            meet = max(meet, meeting.asked_from)
        if running and meeting.asked_from <= first:
            loading = self._missing(meeting.keys[first : meeting.loaded_from]) / rates.loaded
            if self._holds(meeting, loading - unseen, busy):
                request.next_decode_eligible_step = scheduler.current_step + 2  # not in the next step
                return None
        return step_tokens_max(meet * chunk_tokens - position, chunk_tokens, rates)

    def _unseen_seconds(self, meeting: Meeting, coming: int, rates: Rates) -> float:
        """Estimate how long the tier has been loading what it has not reported yet; 0 if it has been late before."""
        if meeting.hold_until is not None:
            return 0.0
        seen = (meeting.job_chunks - coming) / rates.loaded
        return max(0.0, min(self._clock() - meeting.job_begun_at - max(0.0, seen), coming / rates.loaded))

    def _missing(self, keys: list[OffloadKey]) -> int:
        ready = self._manager.primary_tier.ready
        return sum(key not in ready for key in keys)

    def _take_in(self, meeting: Meeting, first: int) -> None:
        """Update the meeting from the CPU tier. All chunks before `first` are computed."""
        cpu_tier, keys = self._manager.primary_tier, meeting.keys
        while meeting.loaded_from > first and keys[meeting.loaded_from - 1] in cpu_tier.ready:
            meeting.loaded_from -= 1
        meeting.asked_from = min(meeting.asked_from, meeting.loaded_from)
        if meeting.asked_from < meeting.loaded_from and keys[meeting.loaded_from - 1] not in cpu_tier.resident:
            # This chunk did not arrive. It will be computed, and the chunks after it can still be used.
            meeting.no_more, meeting.asked_from = True, meeting.loaded_from

    def _promote(self, meeting: Meeting, meet: int, rates: Rates) -> None:
        """Load the next chunks, from the last one back to `meet`."""
        begin = max(meet, meeting.asked_from - job_chunks_max(rates), 0)
        wanted = meeting.keys[begin : meeting.asked_from][::-1]
        if not wanted:
            return
        coming = self._manager.promote_meanwhile(wanted, meeting.context)
        meeting.no_more = coming < len(wanted)
        meeting.asked_from -= coming
        meeting.job_chunks, meeting.job_begun_at = coming, self._clock()

    def _holds(self, meeting: Meeting, loading_seconds: float, busy_seconds: float) -> bool:
        """Whether the request waits for chunks that are nearly loaded. It does so once, until a fixed time."""
        now = self._clock()
        if meeting.hold_until is None:
            if loading_seconds > busy_seconds + HOLD_SECONDS_MAX:
                return False
            meeting.hold_until = now + busy_seconds + HOLD_SECONDS_MAX
        return now < meeting.hold_until

    def _end(self, scheduler: Scheduler, meeting: Meeting, first: int) -> None:
        """Preempt the request: everything that is not computed yet is in the CPU tier."""
        request = meeting.request
        if not self._manager.primary_tier.ready.issuperset(meeting.keys[first:]):
            self._abandon(request.request_id)  # some of it was evicted since
            return
        # If blocks are short, or nothing is admitted, vLLM would not take the request back at once.
        if scheduler.pause_state is not PauseState.UNPAUSED or not self._control.has_room(scheduler):
            return
        del self._meetings[request.request_id]
        if (stats := request.prefill_stats) is not None:
            jump = _Jump(request, stats.num_local_cached_tokens, stats.num_external_cached_tokens)
            self._jumped[request.request_id] = jump
        self._control.preempt(scheduler, request)
        self.jumps += 1
        self._manager.count_meeting(MeetingOutcome.MET)

    def _count_computed_as_computed(self) -> None:
        """vLLM counts the blocks that the request finds on the device as cached, which it has computed itself, or does
        not count again what a preempted request finds and loads."""
        for request_id, jump in list(self._jumped.items()):
            if jump.request.status is RequestStatus.PREEMPTED:
                continue
            del self._jumped[request_id]
            stats = jump.request.prefill_stats
            if stats is not None:
                prompt = stats.num_prompt_tokens
                local = min(jump.local_tokens, stats.num_local_cached_tokens)
                external = jump.external_tokens + jump.loaded_tokens
                stats.set(prompt, local, min(external, prompt - local))  # less if some was loaded twice


def _is_plain(request: Request) -> bool:
    """Whether nothing but the KV of its tokens would be lost by a preemption."""
    return (
        not request.has_encoder_inputs
        and not request.resumable
        and request.pooling_params is None
        and _is_in_prefill(request)
    )


def _is_in_prefill(request: Request) -> bool:
    """Whether no token has been sampled, and no step under way will sample one."""
    return not request.num_output_tokens and not request.num_output_placeholders


stepping_with_meetings = steering(Meetings, "compute_while_loading")
