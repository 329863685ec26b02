"""Steps in which a flood's prompts are left out or bounded (fair_steps: on; plan/step_shares.py has the rule).

vLLM fills a step with the prompts that it began, then with waiting prompts, regardless of who sent them. Before it
does, this module leaves prompts out of the step. A running prompt gets the mark with which vLLM itself lets a request
skip a step; a waiting one leaves the queue until the step is planned. The number of tokens is vLLM's own bound of a
step. Nothing else of vLLM's planning changes, and requests that decode are in every step.

EngineCore process, scheduler thread; no method blocks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from typing_extensions import override
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from spillway_connector.engine.features.feature import SteeringFeature, steering
from spillway_connector.engine.requests.state import RequestFields
from spillway_connector.engine.requests.tenancy import session_of_context, tenant_of_context
from spillway_connector.plan.step_shares import Party, StepShares

# vLLM's queues of requests that do not run: 0.23 has the first two, later versions the first and the last.
_QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")
_LATER = 1 << 62  # a step that never comes
_READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class FairSteps(SteeringFeature):
    """The steps of one engine.

    Args:
        state_of: What the connector knows of a request.
        step_tokens: That vLLM computes in one step at most.
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

    @override
    def came(self, status: RequestFields) -> None:
        self._shares.came(_party(status), self._clock())

    @override
    def schedule(self, scheduler: Scheduler, plan: Callable[[], SchedulerOutput]) -> SchedulerOutput:
        now = self._clock()
        if self._shares.alone(now):
            output = plan()
            self._shares.computed_alone(output.total_num_scheduled_tokens, now)
            return output
        running = [(request, self._party_of(request)) for request in scheduler.running if _computes_prompt(request)]
        waiting = [(request, self._party_of(request)) for queue in _queues(scheduler) for request in queue]
        ready = {party for _, party in running} | {party for request, party in waiting if request.status in _READY}
        step = self._shares.next_step(ready, now)
        if step is None:
            output = plan()
        else:
            others = [request for request, party in running if party not in step.parties]
            # vLLM finds that a load or a grammar is done only of requests that it plans with. In a step of a flood,
            # which comes at least after a few of others, those of everybody are.
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
        return output

    def _party_of(self, request: Request) -> Party:
        state = self._state_of(request.request_id)
        return Party(b"") if state is None else _party(state)


def _party(state: RequestFields) -> Party:
    context = state.req_context
    session = session_of_context(context)
    return Party(tenant_of_context(context), None if session is None else session[1].session)


def _computes_prompt(request: Request) -> bool:
    """Whether a running request has more to compute than its next token: a prompt, or all of it behind a preemption."""
    return request.num_computed_tokens < request.num_tokens - 1


def _queues(scheduler: Scheduler) -> Sequence[Any]:
    return [getattr(scheduler, name) for name in _QUEUES if hasattr(scheduler, name)]


@contextmanager
def _left_out(scheduler: Scheduler, running: Sequence[Request], waiting: set[Request]) -> Iterator[None]:
    """Within the context vLLM plans without these requests. The waiting ones come back behind the others, in their
    order: of one party none overtakes another."""
    marks = [(request, request.next_decode_eligible_step) for request in running]
    for request in running:
        request.next_decode_eligible_step = _LATER
    queues = [(queue, [request for request in queue if request in waiting]) for queue in _queues(scheduler)]
    for queue, held in queues:
        if held:
            queue.remove_requests(held)
    try:
        yield
    finally:
        for request, mark in marks:
            if request.next_decode_eligible_step == _LATER:  # else another rule has set it since
                request.next_decode_eligible_step = mark
        for queue, held in queues:
            for request in held:
                queue.add_request(request)


@contextmanager
def _bounded(scheduler: Scheduler, prompt_tokens: int | None) -> Iterator[None]:
    """Within the context vLLM plans so many tokens at most, or one block, besides those of requests that decode."""
    before = scheduler.max_num_scheduled_tokens
    if prompt_tokens is not None:
        decoding = sum(1 for request in scheduler.running if not _computes_prompt(request))
        least = max(prompt_tokens, scheduler.block_size)  # of some models vLLM computes whole blocks alone
        scheduler.max_num_scheduled_tokens = min(before, decoding * (1 + scheduler.num_spec_tokens) + least)
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = before


stepping_fairly = steering(FairSteps, "fair_steps")
