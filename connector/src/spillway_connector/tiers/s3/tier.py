"""The tier in an S3-compatible object store: a block is one object (see names.py), a whole frame.

No operation lists objects. A lookup is one HEAD for each block, a load one GET, a store one PUT that the store refuses
if the object is there. How long objects live is for the bucket's lifecycle rules, which count from the write.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError, PermissionDeniedError

from spillway_connector.errors import (
    CorruptReason,
    RefusedReason,
    TierCorrupt,
    TierMiss,
    TierPartlyAsked,
    TierRefused,
)
from spillway_connector.limits import S3_CONNECTIONS
from spillway_connector.namespace import Namespace, explain_difference, store_id_of
from spillway_connector.tiers.frame import HEADER_BYTES, build_header, verify
from spillway_connector.tiers.s3.client import S3Client
from spillway_connector.tiers.s3.faults import explained, lacks_conditional_writes
from spillway_connector.tiers.s3.names import S3Names, root_of
from spillway_connector.tiers.s3.place import S3Place
from spillway_connector.tiers.tier import NO_TENANT, BlockInMemory, Clock, EvictionReason, StoreOutcome, WallClock

DOCUMENT_BYTES_MAX = 1 << 20
PIECE_BYTES = 1 << 18  # of a load, after which it counts as received


def _copy_frame(pieces: Sequence[memoryview], header: memoryview, payload: memoryview) -> None:
    """Copy a frame that came in pieces. The GIL is released."""
    begin = 0
    for piece in pieces:
        end = begin + piece.nbytes
        for at, target in ((0, header), (HEADER_BYTES, payload)):
            first, last = max(begin, at), min(end, at + target.nbytes)
            if first < last:
                source = np.frombuffer(piece[first - begin : last - begin], np.uint8)
                np.copyto(np.frombuffer(target[first - at : last - at], np.uint8), source)
        begin = end


class S3Tier:
    """A tier in one bucket. See tier.Tier for the contract.

    connections: requests at once, of lookups and of blocks each.
    """

    name = "s3"
    has_local_index = False
    renews = False  # lifecycle rules count from the write, and this engine removes nothing by age
    under_pressure = False  # a bucket has no bound of which the tier could know
    quarantined: Mapping[str, int] = {}
    evictions: Mapping[EvictionReason, int] = {}

    def __init__(
        self,
        namespace: Namespace,
        payload_bytes: int,
        place: S3Place,
        *,
        connections: int = S3_CONNECTIONS,
        puts_per_second_max: float | None = None,
        gets_per_second_max: float | None = None,
        clock: Clock = time.monotonic,
        wall_clock: WallClock = time.time,
    ) -> None:
        self.payload_bytes = payload_bytes
        self._namespace = namespace
        self._digest = namespace.digest16
        self._place = place
        self._names = S3Names(root_of(place.prefix), namespace.hex)
        self._client = S3Client(
            place,
            connections,
            clock,
            puts_per_second_max=puts_per_second_max,
            gets_per_second_max=gets_per_second_max,
        )
        self._wall_clock = wall_clock
        self._prepared = False
        self._conditional = True  # until the store refuses a write under a condition
        self._received_bytes = 0
        self._written_lock = threading.Lock()
        self._written: int = 0

    @property
    def store_id(self) -> bytes | None:
        """Name the store by endpoint, bucket and prefix as configured: under two names one bucket counts as two."""
        return store_id_of(self._place.name, self._digest)

    @property
    def requests(self) -> Mapping[str, int]:
        """See tier.BilledTier."""
        return self._client.requests

    def contains_now(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Return None: only the store can tell."""
        return None

    def prepare(self, deadline: float) -> None:
        if self._prepared:
            return
        stored = self._client.run(lambda: self._stored_document(deadline), deadline)
        if stored != self._namespace.document:
            raise TierRefused(
                RefusedReason.NAMESPACE,
                f"{self._place}: {self._names.document} describes another layout: "
                f"{explain_difference(self._namespace.document, stored)}; delete it and its blocks if no longer wanted",
            )
        self._prepared = True

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self.prepare(deadline)

        async def ask_all() -> list[bool | None]:
            asking = [asyncio.ensure_future(self._is_there(key, deadline)) for key in keys]
            try:
                return list(await asyncio.gather(*asking))
            finally:
                for each in asking:
                    each.cancel()

        found = self._client.run(ask_all, deadline)
        if unasked := found.count(None):
            message = f"{self._place}: s3.getsPerSecondMax: {unasked} of {len(keys)} blocks were not asked for in time"
            raise TierPartlyAsked([bool(there) for there in found], message)
        return [bool(there) for there in found]

    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        if target.nbytes != self.payload_bytes:
            raise ValueError(f"target: {target.nbytes} bytes given, {self.payload_bytes} needed")
        self.prepare(deadline)
        frame_bytes = HEADER_BYTES + self.payload_bytes

        async def get() -> list[memoryview]:
            async with self._client.transfers:
                await self._client.turn("get", deadline)
                reply = await obstore.get_async(self._client.bucket, self._names.block(key))
                size = reply.meta["size"]
                if size != frame_bytes:  # nothing of it is read: it may be of any size
                    reason = CorruptReason.SHORT if size < frame_bytes else CorruptReason.LENGTH
                    raise TierCorrupt(reason, f"{self._place}: the object has {size} bytes, {frame_bytes} are needed")
                pieces = []
                async for piece in reply.stream(min_chunk_size=PIECE_BYTES):
                    pieces.append(memoryview(piece))
                    self._received_bytes += pieces[-1].nbytes
                return pieces

        header = memoryview(bytearray(HEADER_BYTES))
        _copy_frame(self._client.run(get, deadline), header, target)
        verify(header, target, namespace=self._digest, key=key, payload_bytes=self.payload_bytes)

    @property
    def received_bytes(self) -> int:
        """See tier.ReceivingTier. Written by the client's loop alone."""
        return self._received_bytes

    def in_memory(self, key: bytes, deadline: float) -> BlockInMemory | None:
        """Return None: blocks are in the store."""
        return None

    def store(self, key: bytes, source: memoryview, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        self.prepare(deadline)
        header = build_header(self._digest, key, source, created_ms=int(self._wall_clock() * 1000), tenant=tenant)
        frame = b"".join((header, source))
        if not self._client.run(lambda: self._put(self._names.block(key), frame, deadline), deadline):
            return StoreOutcome.PRESENT
        with self._written_lock:
            self._written += len(frame)
        return StoreOutcome.STORED

    def renew(self, keys: Sequence[bytes], deadline: float, tenant: bytes = NO_TENANT) -> None:
        """Do nothing: to write again, so that lifecycle rules count from now on, costs what a store costs."""

    def discard(self, key: bytes, deadline: float) -> None:
        async def delete() -> None:
            async with self._client.transfers:
                await self._client.turn("delete", deadline)
                await obstore.delete_async(self._client.bucket, self._names.block(key))

        try:
            self._client.run(delete, deadline)
        except TierMiss:
            pass

    def resident_bytes(self, deadline: float) -> int:
        """Return the bytes that this process has stored: a bucket's size needs a listing. Asks if the store answers."""
        self.prepare(deadline)
        self._client.run(lambda: self._ask(deadline), deadline)
        with self._written_lock:
            return self._written

    def close(self) -> None:
        self._client.close()

    async def _ask(self, deadline: float) -> None:
        """Ask the store for an answer. A reply to GET gives the reason of a failure."""
        if await self._found_document(deadline) is None:
            self._prepared = False  # a purge has removed it; the next operation writes it again

    async def _is_there(self, key: bytes, deadline: float) -> bool | None:
        """Ask whether the store has the block; None: not asked, because of the bound of requests."""
        async with self._client.lookups:
            try:
                await self._client.turn("head", deadline)
            except TierRefused:
                return None
            try:
                await obstore.head_async(self._client.bucket, self._names.block(key))
            except FileNotFoundError:
                return False
            except PermissionDeniedError:
                pass
            else:
                return True
        await self._ask(deadline)  # a reply to HEAD gives no reason
        raise TierRefused(
            RefusedReason.PERMISSION,
            f"{self._place}: the document may be read, but not whether an object is there: the credentials lack "
            "s3:ListBucket on the bucket, without which a missing object is answered like a forbidden one",
        )

    async def _stored_document(self, deadline: float) -> bytes:
        """Return the document that is there, or ours after it was written."""
        while (stored := await self._found_document(deadline)) is None:
            try:
                if await self._put(self._names.document, self._namespace.document, deadline):
                    return self._namespace.document
            except PermissionDeniedError:
                return self._namespace.document  # nothing contradicts it, and loads may still succeed
            # else another engine wrote one meanwhile
        return stored

    async def _found_document(self, deadline: float) -> bytes | None:
        async with self._client.lookups:
            await self._client.turn("get", deadline)
            try:
                reply = await obstore.get_async(self._client.bucket, self._names.document)
            except FileNotFoundError as error:
                miss = explained(error, str(self._place))
                if isinstance(miss, TierMiss):
                    return None
                raise miss from error
            size = reply.meta["size"]
            if size > DOCUMENT_BYTES_MAX:
                raise TierRefused(
                    RefusedReason.NAMESPACE, f"{self._place}: {self._names.document}: {size} bytes are no document"
                )
            return bytes(await reply.bytes_async())

    async def _put(self, name: str, value: bytes, deadline: float) -> bool:
        """Write one object. Returns False if there was one."""
        async with self._client.transfers:
            await self._client.turn("put", deadline)
            if self._conditional:
                try:
                    await obstore.put_async(self._client.bucket, name, value, mode="create", use_multipart=False)
                    return True
                except AlreadyExistsError:
                    return False
                except Exception as error:
                    if not lacks_conditional_writes(error):
                        raise
                    self._conditional = False
            # Objects are replaced whole, and what two engines write under one key is the same block.
            await obstore.put_async(self._client.bucket, name, value, mode="overwrite", use_multipart=False)
            return True
