"""Promotion while a request waits for its turn, so that its prefix is in the CPU tier when the turn comes.

vLLM asks the connector about a waiting request only when it could schedule it. While all sequences are taken, or the
head of the queue waits for device blocks, the requests behind it are not looked up, so their loads begin only when a
sequence is free. This module knows each request from its arrival on. At the end of each step it looks up and promotes
the first requests that vLLM has not asked about yet.

Promotion ahead never delays other requests for long. It loads one piece of _PIECE_SECONDS at a time, and only while no
request whose turn has come is loading. It takes at most a fraction of the CPU tier's rows, for which the least recently
used chunks are evicted, as for any promotion. Useless loads have a budget (plan/ahead.py).

A hint (engine/features/hints.py) announces a request that may come. Hints are served after requests, and take at most
half of the rows. A hint ends when the turn of a request with its prefix comes. After HINT_SECONDS it is given up, and
its chunks are the first to be evicted. A hint that finds nothing to promote is given up at once.

EngineCore process, scheduler thread; no method blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Protocol

from typing_extensions import override
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from spillway_connector.engine.features.feature import Feature
from spillway_connector.engine.features.hints import HintOutcome
from spillway_connector.engine.manager.tiering import TieringManager
from spillway_connector.engine.requests.state import RequestFields
from spillway_connector.plan.ahead import AheadOutcome, WasteBudget

_PIECE_SECONDS = 0.1  # of loading: so long may a request whose turn comes wait behind it
_PIECE_CHUNKS_MIN = 8  # as many as threads load at once
_REQUESTS_PER_STEP = 4  # looked up in one step
_FULL_ATTENTION_GROUP = 0
HINT_SECONDS = 60.0  # as long as the gateway lets a request wait by default
HINTS_MAX = 64
_HASHING_SHARE_MAX = 0.01  # of the scheduler's time, for hints' hashes


class Owner(Protocol):
    """The part of the scheduler half that is read here."""

    device_blocks: BlockPool | None


@dataclass(slots=True, eq=False)
class _Waiting:
    status: RequestFields
    promoted: list[OffloadKey] = field(default_factory=list)
    keys: list[OffloadKey] | None = None  # None: not looked at yet
    expires_at: float = math.inf  # of a hint

    @property
    def asker(self) -> ReqContext:
        """The name under which the shared tier looks its chunks up before its turn."""
        return ReqContext(req_id=f"ahead of {self.status.req.request_id}")


class AheadPromotions(Feature):
    """Promotes the prefixes of one engine's waiting requests.

    Attributes:
        waiting: The requests that vLLM has not asked about yet, by id, in order of arrival.
    """

    def __init__(
        self,
        manager: TieringManager,
        owner: Owner,
        *,
        rows_max: int,
        blocks_per_chunk: int,
    ) -> None:
        """rows_max: The rows of the CPU tier that chunks of waiting requests may take; 0 switches this off."""
        self.waiting: dict[str, _Waiting] = {}
        self._manager = manager
        self._owner = owner
        self._rows_max = rows_max
        self._blocks_per_chunk = blocks_per_chunk
        self._due: dict[str, _Waiting] = {}  # those that may have more to promote
        self._rows = 0  # promoted for requests that still wait, hints included
        self._hints: dict[str, _Waiting] = {}  # by id, the oldest first
        self._due_hints: dict[str, _Waiting] = {}
        self._hint_rows = 0
        self._hashes_due_at = -math.inf  # when hashes of another hint may be computed
        self._budget = WasteBudget()

    @override
    def came(self, status: RequestFields) -> None:
        """Note a request that has come. Its turn may be now or much later."""
        if self._rows_max:
            request_id = status.req.request_id
            self.waiting[request_id] = self._due[request_id] = _Waiting(status)

    def turn_came(self, status: RequestFields) -> None:
        """Settle the promotion of a request that vLLM asks about for the first time."""
        request_id = status.req.request_id
        waiting = self.waiting.pop(request_id)
        if self._hints:
            self._use_hints(status)
        self._due.pop(request_id, None)
        if waiting.keys is None:
            return  # the usual request: it never waited
        resident = self._manager.primary_tier.resident
        used = sum(key in resident for key in waiting.promoted)
        self._close(waiting, used, AheadOutcome.EVICTED)

    def hint_refused(self) -> HintOutcome | None:
        """Return why a hint would be refused now, or None if it would be accepted."""
        if not self._rows_max:
            return HintOutcome.OFF
        self._give_up_old_hints()  # an idle engine takes no step in which it could
        now = self._manager.now()
        full = len(self._hints) >= HINTS_MAX or self._hint_rows >= self._rows_max // 2
        return HintOutcome.BUSY if full or now < self._hashes_due_at or not self._budget.allows(now) else None

    def expect(self, status: RequestFields, hashing_seconds: float) -> None:
        """Take a hint: a request with this prefix may come."""
        now = self._manager.now()
        self._hashes_due_at = now + hashing_seconds / _HASHING_SHARE_MAX
        name = status.req.request_id
        self._hints[name] = self._due_hints[name] = _Waiting(status, expires_at=now + HINT_SECONDS)

    def _use_hints(self, status: RequestFields) -> None:
        """Count the hints that were right, because the turn of a request with their prefix has come."""
        status.update_offload_keys()
        asked = frozenset(status.group_states[0].offload_keys)
        resident = self._manager.primary_tier.resident
        for name, hint in list(self._hints.items()):
            if hint.keys and hint.keys[0] in asked:
                self._drop_hint(name)
                self._close(hint, sum(key in resident for key in hint.promoted), AheadOutcome.EVICTED)

    def _give_up_old_hints(self) -> None:
        now = self._manager.now()
        for name, hint in list(self._hints.items()):
            if now < hint.expires_at:
                return
            self._drop_hint(name)
            self._manager.primary_tier.retire(hint.promoted)
            self._close(hint, 0, AheadOutcome.UNUSED)

    def _drop_hint(self, name: str) -> None:
        hint = self._hints.pop(name)
        self._due_hints.pop(name, None)
        self._manager.on_request_finished(hint.status.req_context)
        self._hint_rows -= len(hint.promoted)

    @override
    def ended(self, request_id: str) -> None:
        """Forget the request. If its turn never came, its promoted chunks count as unused."""
        waiting = self.waiting.pop(request_id, None)
        self._due.pop(request_id, None)
        if waiting is not None:
            self._close(waiting, 0, AheadOutcome.UNUSED)

    @override
    def end_step(self, output: SchedulerOutput) -> None:
        """Promote the next chunks of requests that still wait after this step."""
        if self._hints:
            self._give_up_old_hints()
        if (
            not (self._due or self._due_hints)
            or self._manager.rows_being_loaded()
            or not self._budget.allows(self._manager.now())
        ):
            return
        piece = max(_PIECE_CHUNKS_MIN, self._manager.chunks_loaded_in(_PIECE_SECONDS))
        asked = chain(self._due.items(), self._due_hints.items())
        for request_id, waiting in list(islice(asked, _REQUESTS_PER_STEP)):
            is_hint = request_id in self._due_hints
            if waiting.keys is None:
                waiting.keys = self._keys_of(waiting.status)
            room = min(piece, self._rows_max - self._rows)
            if is_hint:
                room = min(room, self._rows_max // 2 - self._hint_rows)
            if room <= 0:
                return
            begun: list[OffloadKey] = []
            more = False
            if waiting.keys:
                begun, more = self._manager.promote_ahead(waiting.keys, waiting.status.req_context, waiting.asker, room)
            waiting.promoted += begun
            piece -= len(begun)
            self._rows += len(begun)
            self._hint_rows += len(begun) * is_hint
            self._manager.count_ahead(AheadOutcome.PROMOTED, len(begun))
            if more:
                continue
            if is_hint and not waiting.promoted:  # its slot is for a hint that finds something
                self._drop_hint(request_id)
                self._close(waiting, 0, AheadOutcome.UNUSED)
            else:
                del (self._due_hints if is_hint else self._due)[request_id]

    def _keys_of(self, status: RequestFields) -> list[OffloadKey]:
        """Return the request's chunks behind the chunks on the device; none if the request would load nothing."""
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
        """Count the blocks of the prefix that the device's prefix cache holds now."""
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
                self._budget.waste(wasted / loaded_in_a_second, self._manager.now())
