"""A load that starts before all of its chunks are in the CPU tier.

While the shared tier is still being read, filled rows are already copied to the device: the load's job is sent to the
workers in pieces. The contract of a load holds. Each piece consists of rows that are ready and pinned, the end is
reported once, and a chunk that does not arrive is reported like one whose copy failed, so it is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadKey, ReqContext

from spillway_connector.engine.cpu_tier.tier import CpuTier
from spillway_connector.engine.ipc.messages import LoadPiece

_PIECES_WANTED = 8  # smaller pieces would cost a step more than they hide


class PendingRows(LoadStoreSpec):
    """A load spec of chunks that are not all ready yet; never sent to a worker."""

    def __init__(self, keys: list[OffloadKey]) -> None:
        self.keys = keys

    @staticmethod
    def medium() -> str:
        return "pending"


class Due(NamedTuple):
    """Positions of chunks within their load."""

    ready: list[int]
    lost: list[int]
    last: bool


class EarlyLoad:
    """The chunks of one load, in order, with the device block that each is for."""

    def __init__(
        self, context: ReqContext, keys: Sequence[OffloadKey], blocks: Sequence[int], first_block: int
    ) -> None:
        """first_block: The index within the request of the first of `blocks`."""
        assert len(keys) == len(blocks), "a load begins early only if a chunk is one block"
        self.context = context
        self.keys, self.blocks, self.first_block = keys, blocks, first_block
        self._waiting = dict(zip(keys, range(len(keys)), strict=True))  # positions of those not sent yet
        self._piece_chunks = max(1, len(keys) // _PIECES_WANTED)
        self._ending: Due | None = None
        self.closed = False  # the last piece has been sent

    def abandon(self, *, needed: bool) -> None:
        """Send no further chunk. Idempotent. `needed` tells whether the request still runs and recomputes them."""
        lost = list(self._waiting.values())
        if self._ending is not None:
            lost += self._ending.lost
        self._waiting.clear()
        self._ending = Due([], lost if needed else [], last=True)

    def due(self, ready: AbstractSet[OffloadKey], resident: AbstractSet[OffloadKey]) -> Due | None:
        """Return the next piece, or None if there is none yet. Each position is returned once.

        Args:
            ready: The chunks that may be read.
            resident: These, and the chunks that are still being written.
        """
        if self.closed:
            return None
        if self._ending is not None:
            self.closed = True
            return self._ending
        waiting = self._waiting
        lost: list[int] = []
        if not resident >= waiting.keys():
            # Chunks after a lost one cannot be used.
            end = min(position for key, position in waiting.items() if key not in resident)
            lost = [position for position in waiting.values() if position >= end]
            for position in lost:
                del waiting[self.keys[position]]
        arrived = [] if ready.isdisjoint(waiting) else [at for key, at in waiting.items() if key in ready]
        last = len(arrived) == len(waiting)
        if not last and not lost and len(arrived) < self._piece_chunks:
            return None
        for position in arrived:
            del waiting[self.keys[position]]
        self.closed = last
        return Due(arrived, lost, last)


class EarlyLoads:
    """The early loads under way in one engine. EngineCore process, scheduler thread; no method blocks.

    Attributes:
        loads: By job.
    """

    def __init__(self, cpu_tier: CpuTier, new_job_id: Callable[[], int]) -> None:
        self._cpu_tier = cpu_tier
        self._new_job_id = new_job_id
        self.loads: dict[int, EarlyLoad] = {}

    def begin(self, job_id: int, load: EarlyLoad) -> None:
        """Take a load of which nothing is pinned yet."""
        self.loads[job_id] = load

    def due(self, jobs: Mapping[int, Any]) -> list[LoadPiece]:
        """Pin the rows that have arrived, and return the pieces to send in this step.

        Args:
            jobs: vLLM's jobs under way. One that is not there was dropped by a reset, while the workers still have it.
        """
        pieces: list[LoadPiece] = []
        for job_id, load in list(self.loads.items()):
            due = load.due(self._cpu_tier.ready, self._cpu_tier.resident)
            if due is None:
                continue
            job = jobs.get(job_id)
            transfer_spec: tuple[LoadStoreSpec, LoadStoreSpec] | None = None
            if due.ready and job is not None:
                keys = [load.keys[position] for position in due.ready]
                rows = self._cpu_tier.prepare_load(keys, load.context)
                job.keys.update(keys)
                blocks = [load.blocks[position] for position in due.ready]
                transfer_spec = rows, GPULoadStoreSpec(blocks, [len(blocks)], [load.first_block + due.ready[0]])
            lost_blocks = [load.blocks[position] for position in due.lost]
            piece_id = self._new_job_id()
            pieces.append(LoadPiece(job_id, piece_id, load.context.req_id, transfer_spec, due.last, lost_blocks))
            if job is None and due.last:
                del self.loads[job_id]
        return pieces

    def abandon(self, job_ids: Collection[int]) -> None:
        """The request of these jobs has ended."""
        for job_id in self.loads.keys() & job_ids:
            self.loads[job_id].abandon(needed=False)

    def tier_was_reset(self) -> None:
        """Abandon all loads, as the tier was reset: their requests still run, and recompute what has not been sent."""
        for load in self.loads.values():
            load.abandon(needed=True)

    def ended(self, completed: Collection[int], jobs: Collection[int]) -> Iterator[Sequence[OffloadKey]]:
        """Forget the completed jobs that vLLM has no more. Yields the chunks of each."""
        for job_id in completed:
            if job_id in self.loads and job_id not in jobs:
                yield self.loads.pop(job_id).keys

    def requests(self) -> set[str]:
        """The requests whose blocks these loads may still write to."""
        return {load.context.req_id for load in self.loads.values()}
