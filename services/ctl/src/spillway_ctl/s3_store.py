"""A tier in an S3-compatible object store as an operator sees it.

Walking lists the bucket, a thousand objects in each request; a walk that needs headers also reads the first bytes of
each object, many at once. Both cost what the store asks for requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import obstore

from spillway_connector.errors import CorruptReason, TierCorrupt, TierError, TierMiss
from spillway_connector.tiers.frame import HEADER_BYTES, FrameHeader, read_header, verify
from spillway_connector.tiers.inspection import CheckPayload, Damage, Gone, Removal, StoredFrame, StoredNamespace
from spillway_connector.tiers.s3.client import S3Client
from spillway_connector.tiers.s3.faults import explained
from spillway_connector.tiers.s3.names import S3Names, parse_name, root_of
from spillway_connector.tiers.s3.place import S3Place
from spillway_connector.tiers.tier import Clock
from spillway_ctl.store import Extent

REQUESTS_AT_ONCE = 32
HEADERS_AT_ONCE = 256
_Value = TypeVar("_Value")


class S3BucketStore:
    """See store.Store. Nothing is connected before the first question.

    answer_seconds: for one request, or for the headers of HEADERS_AT_ONCE objects.
    """

    kind = "s3"
    layout = "bucket"

    def __init__(self, place: S3Place, *, answer_seconds: float = 5.0, clock: Clock = time.monotonic) -> None:
        self._place = place
        self._answer_seconds = answer_seconds
        self._clock = clock
        self._root = root_of(place.prefix)
        self._client = S3Client(place, REQUESTS_AT_ONCE, clock)

    @property
    def location(self) -> str:
        return str(self._place)

    def now_s(self) -> float:
        return time.time()

    def check(self) -> None:
        self._folders()

    def notes(self) -> list[str]:
        return []

    def extent(self) -> Extent:
        return Extent(None, None, "a bucket has no limit; its lifecycle rules remove what is old")

    def namespaces(self) -> Iterator[StoredNamespace]:
        for folder in self._folders():
            digest = folder.rpartition("/")[2]
            if parse_name(self._root, f"{self._root}/{digest}/document") is not None:
                yield StoredNamespace(bytes.fromhex(digest), self._document(digest))

    def frames(self, *, headers: bool, namespace_prefix: str = "") -> Iterator[StoredFrame]:
        """Yield the frames; without headers a frame's creation is that of its object."""
        whole = len(namespace_prefix) == 32
        folder = S3Names(self._root, namespace_prefix).folder if whole else self._root
        pages = self._said(lambda: iter(obstore.list(self._client.bucket, folder, chunk_size=1000)))
        while (page := self._said(lambda: next(pages, None))) is not None:
            found = [frame for each in page if (frame := self._listed(each)) is not None]
            found = [frame for frame in found if frame.namespace.hex().startswith(namespace_prefix)]
            if not headers:
                yield from found
                continue
            for start in range(0, len(found), HEADERS_AT_ONCE):
                yield from self._with_headers(found[start : start + HEADERS_AT_ONCE])

    def share_walked(self) -> float | None:
        return None  # how many objects there are is known at the end of the listing

    def verify(self, frame: StoredFrame, check_payload: CheckPayload | None = None) -> Damage | None:
        name = parse_name(self._root, frame.place)
        assert name is not None and name.key is not None
        try:
            value = memoryview(self._client.run(lambda: self._get(frame.place, None), self._soon()))
            header = read_header(value[:HEADER_BYTES])
            payload = value[HEADER_BYTES:]
            verify(
                value[:HEADER_BYTES],
                payload,
                namespace=frame.namespace,
                key=name.key,
                payload_bytes=header.payload_bytes,
            )
        except TierMiss:
            raise Gone from None
        except TierCorrupt as corrupt:
            return Damage(corrupt.reason, str(corrupt))
        return None if check_payload is None else check_payload(frame, payload)

    def remove(self, frames: Sequence[StoredFrame], *, only_unused: bool) -> Removal:
        """Uses are not recorded here, so ``only_unused`` changes nothing: ages count from the creation. No store
        says which objects there were, so all of them count."""
        self._delete([frame.place for frame in frames])
        return Removal(len(frames), sum(frame.stored_bytes for frame in frames))

    def sweep(self, namespace: bytes) -> None:
        """The document, which an engine in use writes again."""
        self._delete([S3Names(self._root, namespace.hex()).document])

    def close(self) -> None:
        self._client.close()

    def _folders(self) -> list[str]:
        found = self._said(lambda: obstore.list_with_delimiter(self._client.bucket, self._root))
        return sorted(found["common_prefixes"])

    def _document(self, namespace: str) -> bytes | None:
        try:
            return self._client.run(lambda: self._get(S3Names(self._root, namespace).document, None), self._soon())
        except TierMiss:
            return None

    def _listed(self, listed: Any) -> StoredFrame | None:
        """Return the listed frame; None: the object is no block's."""
        name = parse_name(self._root, listed["path"])
        if name is None or name.key is None:
            return None
        return StoredFrame(
            bytes.fromhex(name.namespace),
            listed["size"],
            listed["path"],
            None,
            key=name.key,
            created_s=listed["last_modified"].timestamp(),
        )

    def _with_headers(self, frames: Sequence[StoredFrame]) -> list[StoredFrame]:
        """Read the headers of the frames, except of those that were removed since they were listed."""

        async def read(frame: StoredFrame) -> StoredFrame | None:
            if frame.stored_bytes < HEADER_BYTES:
                return _damaged(frame, CorruptReason.SHORT)
            try:
                return _described(frame, read_header(await self._get(frame.place, HEADER_BYTES)))
            except TierCorrupt as corrupt:
                return _damaged(frame, CorruptReason(corrupt.reason))
            except FileNotFoundError:
                return None

        async def read_all() -> list[StoredFrame | None]:
            return await asyncio.gather(*map(read, frames))

        return [frame for frame in self._client.run(read_all, self._soon()) if frame is not None]

    async def _get(self, name: str, first_bytes: int | None) -> bytes:
        async with self._client.transfers:
            options: Any = None if first_bytes is None else {"range": (0, first_bytes)}
            reply = await obstore.get_async(self._client.bucket, name, options=options)
            return bytes(await reply.bytes_async())

    def _delete(self, names: Sequence[str]) -> None:
        async def delete(name: str) -> None:
            async with self._client.transfers:
                try:
                    await obstore.delete_async(self._client.bucket, name)
                except FileNotFoundError:
                    pass  # some stores say so

        async def delete_all() -> None:
            await asyncio.gather(*map(delete, names))

        self._client.run(delete_all, self._soon())

    def _said(self, ask: Callable[[], _Value]) -> _Value:
        """The answer to a request of a listing, which has the client's own timeout. Raises TierError."""
        try:
            return ask()
        except TierError:
            raise
        except Exception as error:
            raise explained(error, str(self._place)) from error

    def _soon(self) -> float:
        return self._clock() + self._answer_seconds


def _described(frame: StoredFrame, header: FrameHeader) -> StoredFrame:
    """The header alone decides."""
    if header.namespace != frame.namespace:
        return _damaged(frame, CorruptReason.NAMESPACE)
    if header.key != frame.key or header.part.count != 1:
        return _damaged(frame, CorruptReason.KEY)
    if frame.stored_bytes - HEADER_BYTES != header.payload_bytes:
        is_short = frame.stored_bytes - HEADER_BYTES < header.payload_bytes
        return _damaged(frame, CorruptReason.SHORT if is_short else CorruptReason.LENGTH)
    return replace(frame, tenant=header.tenant, payload_bytes=header.payload_bytes, created_s=header.created_ms / 1000)


def _damaged(frame: StoredFrame, reason: CorruptReason) -> StoredFrame:
    return replace(frame, created_s=None, damage=Damage(reason, "its header cannot be trusted"))
