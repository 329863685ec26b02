"""A load that begins before all of its chunks have come: which of them may leave now, and which never will.

While a shared tier is still being read, the rows that are filled can be copied to the device already; a job then
leaves for the workers in pieces. What is promised of a load stays: each piece is of rows that are ready and pinned, the
request hears of the end once, and a chunk that does not come is reported like one whose copy failed, so that it is
recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadKey, ReqContext
from vllm.v1.kv_offload.worker.worker import TransferSpec

_PIECES_WANTED = 8  # smaller pieces would cost a step more than they hide


class ComingRows(LoadStoreSpec):
    """The rows of chunks some of which have still to come; never leaves the scheduler."""

    def __init__(self, keys: list[OffloadKey]) -> None:
        self.keys = keys

    @staticmethod
    def medium() -> str:
        return "coming"


@dataclass(slots=True)
class LoadPiece:
    """A part of load `job_id`; the job ends when `last` has been seen and every piece has ended.

    piece_id: a job id of its own. transfer_spec: None where there is nothing (more) to copy. lost_blocks: device blocks
    of the job that will not be filled.
    """

    job_id: int
    piece_id: int
    request_id: str
    transfer_spec: TransferSpec | None
    last: bool
    lost_blocks: list[int]


@dataclass
class SpillwayConnectorMetadata(OffloadingConnectorMetadata):
    """Of a step in which pieces leave."""

    pieces: list[LoadPiece] = field(default_factory=list)


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
        """first_block: the logical index of the first of `blocks` within the request."""
        assert len(keys) == len(blocks), "a load begins early only where a chunk is one block"
        self.context = context
        self.keys, self.blocks, self.first_block = keys, blocks, first_block
        self._waiting = dict(zip(keys, range(len(keys)), strict=True))  # positions of those that have not left
        self._piece_chunks = max(1, len(keys) // _PIECES_WANTED)
        self._ending: Due | None = None
        self.closed = False  # the last piece has left

    def abandon(self, *, needed: bool) -> None:
        """What has not left will not. needed: by a request that has to recompute it. Twice is harmless."""
        lost = list(self._waiting.values())
        if self._ending is not None:
            lost += self._ending.lost
        self._waiting.clear()
        self._ending = Due([], lost if needed else [], last=True)

    def due(self, ready: AbstractSet[OffloadKey], resident: AbstractSet[OffloadKey]) -> Due | None:
        """What leaves now; None: nothing yet. Positions are due once.

        ready: chunks that may be read. resident: those and the ones that are still being written.
        """
        if self.closed:
            return None
        if self._ending is not None:
            self.closed = True
            return self._ending
        waiting = self._waiting
        lost: list[int] = []
        if not resident >= waiting.keys():
            # What lies behind a chunk that is gone is of no use.
            end = min(position for key, position in waiting.items() if key not in resident)
            lost = [position for position in waiting.values() if position >= end]
            for position in lost:
                del waiting[self.keys[position]]
        come = [] if ready.isdisjoint(waiting) else [at for key, at in waiting.items() if key in ready]
        last = len(come) == len(waiting)
        if not last and not lost and len(come) < self._piece_chunks:
            return None
        for position in come:
            del waiting[self.keys[position]]
        self.closed = last
        return Due(come, lost, last)
