"""The blocks in the bucket of a local stack, read without an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import obstore
from obstore.store import S3Store

from spillway_stack import object_store


def bucket_at(port: int) -> S3Store:
    key_id, secret = object_store.KEYS.values()
    return S3Store(
        object_store.BUCKET,
        endpoint=f"http://127.0.0.1:{port}",
        region="us-east-1",
        access_key_id=key_id,
        secret_access_key=secret,
        client_options={"allow_http": True},
    )


def objects_in(port: int) -> list[tuple[str, int]]:
    """The blocks in the object store: name, bytes."""
    found = (each for page in obstore.list(bucket_at(port)) for each in page)
    return [(each["path"], each["size"]) for each in found if not each["path"].endswith("document")]


def objects_alone(port: int, count: int) -> float:
    """Seconds in which so many objects come through this port at once, over connections that are there already."""
    bucket = bucket_at(port)
    names = [name for name, _ in objects_in(port)[: 2 * count]]

    async def get_all(wanted: Sequence[str]) -> float:
        async def get(name: str) -> None:
            reply = await obstore.get_async(bucket, name)
            await reply.bytes_async()

        begun = time.perf_counter()
        await asyncio.gather(*(get(name) for name in wanted))
        return time.perf_counter() - begun

    async def warm_and_get() -> float:
        await get_all(names[count:])
        return await get_all(names[:count])

    return asyncio.run(warm_and_get())
