"""Steps in which a flood's prompts are left out or bounded (fair_steps: on; plan/step_shares.py has the rule).

vLLM fills a step with the prompts that it began, then with waiting prompts, regardless of who sent them. Before it
does, this module leaves prompts out of the step. A running prompt gets the mark with which vLLM itself lets a request
skip a step; a waiting one leaves the queue until the step is planned. vLLM's own bound on a step
bounds the tokens. Requests of a flood that decode are left out in the same way, unless drafts are verified.

A request that is left out is overtaken, so vLLM's running requests would no longer have those that decode before the
prompts that have begun, and a prompt would take a whole step. So they are put into that order. Nothing else of vLLM's
planning changes.

EngineCore process, scheduler thread; no method blocks.
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from typing_extensions import override
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from spillway_connector.engine.features.feature import HasFeatures, SteeringFeature, feature_of, steering
from spillway_connector.engine.patches.own_connector import own_connector
from spillway_connector.engine.requests.state import RequestFields
from spillway_connector.engine.requests.tenancy import session_of_context, tenant_of_context
from spillway_connector.plan.step_shares import Party, StepShares

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

# vLLM's queues of requests that do not run: 0.23 has the first two, later versions the first and the last.
_QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")
_LATER = 1 << 62  # a step that never comes
_READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class FairSteps(SteeringFeature):
    """The steps of one engine.

    Args:
        state_of: What the connector knows of a request.
        step_tokens: The most tokens that vLLM computes in one step.
    """

    def __init__(
        self,
        state_of: Callable[[str], RequestFields | None],
        step_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state_of = state_of
        self._shares = StepShares(step_tokens)
        self._clock = clock
        self._held_seconds = 0.0  # of the next plan
        self._plan_at: float | None = None  # once it is held

    @override
    def came(self, status: RequestFields) -> None:
        party, now = _party(status), self._clock()
        self._shares.came(party, now)
        if self._held_seconds and not self._shares.floods(party, now):
            self._held_seconds = 0.0

    def seconds_until_plan(self) -> float:
        """Return how long to wait before the next step is planned, although one is under way: other requests may come
        until then."""
        if not self._held_seconds:
            return 0.0
        now = self._clock()
        if self._plan_at is None:
            self._plan_at = now + self._held_seconds
        return self._plan_at - now

    @override
    def schedule(self, scheduler: Scheduler, plan: Callable[[], SchedulerOutput]) -> SchedulerOutput:
        now = self._clock()
        self._held_seconds, self._plan_at = 0.0, None
        if self._shares.alone(now):
            output = plan()
            self._shares.computed_alone(output.total_num_scheduled_tokens, now)
            return output
        scheduler.running.sort(key=_computes_prompt)
        begun = [(request, self._party_of(request)) for request in scheduler.running]
        running = [(request, party) for request, party in begun if _computes_prompt(request)]
        waiting = [(request, self._party_of(request)) for each in _queues(scheduler) for request in each]
        ready = {party for _, party in running} | {party for request, party in waiting if request.status in _READY}
        step = self._shares.next_step(ready, now, {party for _, party in (*begun, *waiting)})
        if step is None:
            output = plan()
        else:
            others = [request for request, party in running if party not in step.parties]
            # A worker keeps the draft behind a request's last token, and the states behind each token of it, only for
            # the requests of its last step.
            pauses = step.pauses if not scheduler.num_spec_tokens else ()
            others += [request for request, party in begun if party in pauses and not _computes_prompt(request)]
            # vLLM notices that a load or a grammar is done only for requests that it sees when it plans. In a step of a
            # flood, of which one comes at least after a few steps of others, it sees everybody's requests.
            queued = {
                request
                for request, party in waiting
                if not (step.begins and party in step.parties) and (request.status in _READY or not step.is_floods)
            }
            with _left_out(scheduler, others, queued), _bounded(scheduler, step.tokens):
                output = plan()
        tokens: Counter[Party] = Counter()
        for request, party in (*running, *waiting):
            tokens[party] += output.num_scheduled_tokens.get(request.request_id, 0)
        self._shares.computed(tokens, now)
        if step is not None and not any(tokens[party] for party in step.parties):
            self._shares.passed_over(step.parties)
        elif step is not None:
            self._held_seconds = step.held_seconds
        return output

    def _party_of(self, request: Request) -> Party:
        state = self._state_of(request.request_id)
        return Party(b"") if state is None else _party(state)


def _party(state: RequestFields) -> Party:
    context = state.req_context
    session = session_of_context(context)
    return Party(tenant_of_context(context), None if session is None else session[1].session)


def _computes_prompt(request: Request) -> bool:
    """Whether a running request has more to compute than its next token: the rest of its prompt, or everything again
    after a preemption."""
    return request.num_computed_tokens < request.num_tokens - 1


def _queues(scheduler: Scheduler) -> Sequence[Any]:
    return [getattr(scheduler, name) for name in _QUEUES if hasattr(scheduler, name)]


@contextmanager
def _left_out(scheduler: Scheduler, running: Sequence[Request], waiting: set[Request]) -> Iterator[None]:
    """Hide these requests from vLLM's planning within the context. The waiting ones come back behind the others, in
    their order: of one party none overtakes another."""
    marks = [(request, request.next_decode_eligible_step) for request in running]
    for request in running:
        request.next_decode_eligible_step = _LATER
    queues = [(each, [request for request in each if request in waiting]) for each in _queues(scheduler)]
    for each, held in queues:
        if held:
            each.remove_requests(held)
    try:
        yield
    finally:
        for request, mark in marks:
            if request.next_decode_eligible_step == _LATER:  # else another rule has set it since
                request.next_decode_eligible_step = mark
        for each, held in queues:
            for request in held:
                each.add_request(request)


@contextmanager
def _bounded(scheduler: Scheduler, prompt_tokens: int | None) -> Iterator[None]:
    """Limit vLLM's planning within the context to this number of prompt tokens, or to one block; requests that decode
    are not limited."""
    before = scheduler.max_num_scheduled_tokens
    if prompt_tokens is not None:
        decoding = sum(1 for request in scheduler.running if not _computes_prompt(request))
        least = max(prompt_tokens, scheduler.block_size)  # for some models vLLM computes only whole blocks
        scheduler.max_num_scheduled_tokens = min(before, decoding * (1 + scheduler.num_spec_tokens) + least)
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = before


stepping_fairly = steering(FairSteps, "fair_steps")


def awaiting_others(original: Callable[[EngineCoreProc], None]) -> Callable[[EngineCoreProc], None]:
    """Wrap EngineCoreProc._process_input_queue, after which the engine plans its next step, so that it takes requests
    for a while longer if a step of a flood is under way."""

    def process_input_queue(self: EngineCoreProc) -> None:
        original(self)
        if not self.batch_queue:  # without asynchronous scheduling there is none, and else no step is under way
            return
        connector = own_connector(self.scheduler, HasFeatures)  # type: ignore[type-abstract]
        feature = None if connector is None else feature_of(connector.scheduler_features, FairSteps)
        while feature is not None and (seconds := feature.seconds_until_plan()) > 0:
            try:
                request = self.input_queue.get(timeout=seconds)
            except queue.Empty:
                return
            self._handle_client_request(*request)

    return process_input_queue
