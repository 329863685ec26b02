"""A real object store, filled by the real tier and damaged behind its back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import obstore
from ctl_media import ONE, PAGE_BYTES, PAYLOAD_BYTES
from s3_servers import BUCKET, S3Server

from spillway_connector.namespace import Namespace
from spillway_connector.tiers.s3.client import S3Client
from spillway_connector.tiers.s3.names import S3Names, root_of
from spillway_connector.tiers.s3.place import S3Place
from spillway_connector.tiers.s3.tier import S3Tier
from spillway_connector.tiers.tier import Tier
from spillway_ctl.s3_store import S3BucketStore
from spillway_ctl.store import Store


class S3Medium:
    """A prefix of its own in the bucket of a server."""

    _numbers = itertools.count()

    def __init__(self, server: S3Server) -> None:
        self.place = S3Place(BUCKET, prefix=f"ctl-{next(self._numbers)}/", endpoint=server.endpoint)
        self.options = ["--s3", f"s3://{BUCKET}/{self.place.prefix}", "--s3-endpoint", server.endpoint]

    def tier(self, namespace: Namespace = ONE, *, size: int = PAYLOAD_BYTES) -> Tier:
        return S3Tier(namespace, size, self.place)

    @contextmanager
    def aged(self, namespace: Namespace, keys: list[bytes], seconds: float) -> Iterator[None]:
        assert not seconds, "the store's own clock tells the age of its objects"
        yield

    def store(self) -> Store:
        return S3BucketStore(self.place)

    def overwrite(self, namespace: Namespace, key: bytes, offset: int, new: bytes) -> None:
        where = offset if offset < 192 else offset - PAGE_BYTES + 192
        bucket, name = S3Client(self.place, 1).bucket, S3Names(root_of(self.place.prefix), namespace.hex).block(key)
        frame = bytearray(obstore.get(bucket, name).bytes())
        frame[where : where + len(new)] = new
        obstore.put(bucket, name, bytes(frame))
