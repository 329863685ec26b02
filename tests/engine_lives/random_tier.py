"""A shared tier in memory whose chunks arrive at random times, one after the other, and sometimes never."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from spillway_connector.engine.generation import Generation, generation
from spillway_connector.engine.shared_tiers.prefix_tier import PrefixTier, TierJobResult
from spillway_connector.namespace import Namespace
from spillway_connector.plan.prefix_memo import ChangeLog
from spillway_connector.transfer.lookups import Answers, Lookup

RANDOM = "random"


class RandomTier(PrefixTier):
    """Bytes move at `advance`, not when they are submitted, which exposes a row that is read before a load, or written
    before a store has read it."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **_: Any) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.answered_requests = ChangeLog()
        self.rng = random.Random(0)
        self.losing_share = 0.0
        self._rows = np.frombuffer(primary_kv_view, np.uint8).reshape(len(primary_kv_view), -1)
        self._frames: dict[bytes, bytes] = {}
        self._namespaces: dict[bytes, dict[bytes, bytes]] = {}
        # With the frames of the namespace that they began under, and the missing keys and their rows.
        self._loads: list[tuple[Any, dict[bytes, bytes], list[OffloadKey], list[int]]] = []
        self._stores: list[tuple[Any, dict[bytes, bytes]]] = []
        self._failed: dict[int, set[bytes]] = {}
        self._arrived: list[tuple[int, list[OffloadKey]]] = []
        self._ended: list[JobResult] = []

    @property
    def open(self) -> bool:
        return True

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> Any:
        found = key in self._frames
        if generation() is Generation.V023:
            return found
        from vllm.v1.kv_offload.base import LookupResult

        return LookupResult.HIT if found else LookupResult.MISS

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Answers:
        there = next((at for at, key in enumerate(keys) if key not in self._frames), len(keys))
        return Answers([Lookup.HIT] * there + [Lookup.MISS] * (there < len(keys)), float("inf"))

    def use_namespace(self, namespace: Namespace) -> None:
        self._frames = self._namespaces.setdefault(namespace.digest16, {})
        self.answered_requests.add_all()

    def submit_store(self, job_metadata: Any) -> None:
        assert job_metadata.req_context.req_id, "chunks of an unknown request were offered to a shared tier"
        self._stores.append((job_metadata, self._frames))

    def submit_load(self, job_metadata: Any) -> None:
        self._loads.append((job_metadata, self._frames, list(job_metadata.keys), _rows_of(job_metadata)))

    def advance(self, chunks: int, stores: int) -> None:
        """Read the next `chunks` chunks, and write the oldest `stores` stores."""
        for job, frames in self._stores[:stores]:
            keys = list(job.keys)
            for key, row in zip(keys, _rows_of(job), strict=True):
                frames[key] = self._rows[row].tobytes()
            self.answered_requests.add(keys)
            self._ended.append(TierJobResult(job.job_id, success=True))
        del self._stores[:stores]
        while chunks and self._loads:
            job, frames, keys, rows = self._loads[0]
            key, row = keys.pop(0), rows.pop(0)
            chunks -= 1
            failed = self._failed.setdefault(job.job_id, set())
            if self.rng.random() < self.losing_share or key not in frames:
                failed.add(key)
                frames.pop(key, None)
                self.answered_requests.add([key])
            else:
                self._rows[row] = np.frombuffer(frames[key], np.uint8)
                self._arrived.append((job.job_id, [key]))
            if not keys:
                del self._loads[0]
                self._arrived = [pair for pair in self._arrived if pair[0] != job.job_id]
                failed_keys = frozenset(self._failed.pop(job.job_id))
                self._ended.append(TierJobResult(job.job_id, not failed, failed_keys=failed_keys, seconds=1e-9))

    def take_arrived(self) -> Iterable[tuple[int, list[OffloadKey]]]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def get_finished_jobs(self) -> Iterable[JobResult]:
        ended, self._ended = self._ended, []
        return ended

    def drain_jobs(self) -> None:
        raise AssertionError("the connector's own manager drains no tier")

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()


def _rows_of(job: Any) -> list[int]:
    rows: list[int] = (job.block_ids if generation() is Generation.V023 else job.chunk_ids).tolist()
    return rows


if RANDOM not in SecondaryTierFactory._registry:
    SecondaryTierFactory.register_tier(RANDOM, "engine_lives.random_tier", "RandomTier")
