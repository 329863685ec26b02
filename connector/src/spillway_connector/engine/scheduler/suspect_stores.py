"""Stores under way whose chunks were computed with something that is not what their keys say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

from spillway_connector.engine.requests.state import RequestFields

IsSuspect = Callable[[RequestFields], bool]


def fail_stores(half: Any, is_suspect: IsSuspect) -> None:
    """Fail the stores of the scheduler half's suspect requests: none of what they store is published."""
    for job in half._jobs.values():
        if job.is_store and is_suspect(half._req_status[job.req_id]):
            half.manager.fail_store(job.keys)


def has_replaced_adapter(request: RequestFields) -> bool:
    """Whether other weights were loaded under its adapter's id."""
    return request.adapter is not None and not request.adapter.current


def holds_any(blocks: AbstractSet[int]) -> IsSuspect:
    """Device blocks that their load did not fill. A load of another connector (vLLM's MultiConnector) shows this only
    after the step that reads its blocks; a load of Spillway's has no store beside it."""
    return lambda request: any(not blocks.isdisjoint(state.block_ids) for state in request.group_states)


def blocks_of(requests: Iterable[RequestFields]) -> Iterator[int]:
    """Yield the device blocks of these requests: what they computed behind a bad one is not what its key says."""
    for request in requests:
        for state in request.group_states:
            yield from state.block_ids
