"""Promotion while a request waits for its turn, so that its prefix is in the CPU tier when the turn comes.

vLLM asks the connector about a waiting request only when it could schedule it: with all sequences taken, or the head of
the queue waiting for device blocks, those behind are not looked up, and the load begins when the slot is free already.
Here every request that was added and not asked about is known from its arrival on, and at the end of a step the first
of them are looked up and promoted.

It never holds up others for long: one piece is loaded at a time, of _PIECE_SECONDS, and only while no request whose
turn has come loads. It keeps at most a fraction of the CPU tier's rows, the least recently used of the others being
evicted for them as at the turn itself. Loads that turn out to be useless have a budget (plan/ahead.py).

EngineCore process, scheduler thread; no method blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from spillway_connector.engine.request_state import RequestFields
from spillway_connector.engine.tiering import TieringManager
from spillway_connector.plan.ahead import AheadOutcome, WasteBudget

_PIECE_SECONDS = 0.1  # of loading: so long may a request whose turn comes wait behind it
_PIECE_CHUNKS_MIN = 8  # as many as threads load at once
_REQUESTS_PER_STEP = 4  # looked up in one step
_FULL_ATTENTION_GROUP = 0


class Owner(Protocol):
    """The part of the scheduler half that is read here."""

    device_blocks: BlockPool | None


@dataclass(slots=True, eq=False)
class _Waiting:
    status: RequestFields
    asker: ReqContext
    promoted: list[OffloadKey] = field(default_factory=list)
    keys: list[OffloadKey] | None = None  # None: not looked at yet


class AheadPromotions:
    """Of one engine's waiting requests. rows_max: of the CPU tier, for chunks whose requests wait; 0: switched off.

    waiting: requests that were added and not asked about, by id, in order of arrival.
    """

    def __init__(
        self,
        manager: TieringManager,
        owner: Owner,
        *,
        rows_max: int,
        blocks_per_chunk: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waiting: dict[str, _Waiting] = {}
        self._manager = manager
        self._owner = owner
        self._rows_max = rows_max
        self._blocks_per_chunk = blocks_per_chunk
        self._clock = clock
        self._due: dict[str, _Waiting] = {}  # those that may have more to promote
        self._rows = 0  # promoted for requests that still wait
        self._budget = WasteBudget()

    def add(self, request_id: str, status: RequestFields) -> None:
        """A request has come; its turn may be now, or much later."""
        if self._rows_max:
            waiting = _Waiting(status, ReqContext(req_id=f"ahead of {request_id}"))
            self.waiting[request_id] = self._due[request_id] = waiting

    def turn_came(self, request_id: str) -> None:
        """vLLM asks about the request."""
        waiting = self.waiting.pop(request_id)
        self._due.pop(request_id, None)
        if waiting.keys is None:
            return  # the usual request: it never waited
        resident = self._manager.primary_tier.resident
        used = sum(key in resident for key in waiting.promoted)
        self._close(waiting, used, AheadOutcome.EVICTED)

    def ended(self, request_id: str) -> None:
        """The request is over; where it never had a turn, what was promoted for it was of no use."""
        waiting = self.waiting.pop(request_id, None)
        self._due.pop(request_id, None)
        if waiting is not None:
            self._close(waiting, 0, AheadOutcome.UNUSED)

    def end_step(self) -> None:
        """Promote the next piece for those that this step left waiting."""
        if not self._due or self._manager.rows_being_loaded() or not self._budget.allows(self._clock()):
            return
        piece = max(_PIECE_CHUNKS_MIN, self._manager.chunks_loaded_in(_PIECE_SECONDS))
        for request_id, waiting in list(islice(self._due.items(), _REQUESTS_PER_STEP)):
            if waiting.keys is None:
                waiting.keys = self._keys_of(waiting.status)
            room = min(piece, self._rows_max - self._rows)
            if room <= 0:
                return
            begun: list[OffloadKey] = []
            more = False
            if waiting.keys:
                begun, more = self._manager.promote_ahead(waiting.keys, waiting.status.req_context, waiting.asker, room)
            waiting.promoted += begun
            piece -= len(begun)
            self._rows += len(begun)
            self._manager.count_ahead(AheadOutcome.PROMOTED, len(begun))
            if not more:
                del self._due[request_id]

    def _keys_of(self, status: RequestFields) -> list[OffloadKey]:
        """The request's chunks behind those that the device has; none where it would load none."""
        request = status.req
        if request.skip_reading_prefix_cache or (
            status.has_adapter and (status.adapter is None or status.adapter.key is None)
        ):
            return []
        status.update_offload_keys()
        keys = status.group_states[0].offload_keys
        cached = self._cached_hashes(request.block_hashes) // self._blocks_per_chunk
        if cached and len(keys) - cached <= 1:
            return []  # all but the last chunk, which is computed
        return keys[cached:]

    def _cached_hashes(self, block_hashes: Sequence[BlockHash]) -> int:
        """Of the prefix, how many blocks the device's prefix cache has at the moment."""
        device = self._owner.device_blocks
        if device is None:
            return 0
        for position, block_hash in enumerate(block_hashes):
            if device.get_cached_block(block_hash, [_FULL_ATTENTION_GROUP]) is None:
                return position
        return len(block_hashes)

    def _close(self, waiting: _Waiting, used: int, otherwise: AheadOutcome) -> None:
        chunks = len(waiting.promoted)
        self._rows -= chunks
        self._manager.forget_ahead(waiting.asker)
        self._manager.count_ahead(AheadOutcome.USED, used)
        if wasted := chunks - used:
            self._manager.count_ahead(otherwise, wasted)
            if loaded_in_a_second := self._manager.chunks_loaded_in(1.0):
                self._budget.waste(wasted / loaded_in_a_second, self._clock())
