"""Rates of a shared tier from here, measured with a few megabytes that no engine sees and that are removed.

One thread and plain calls: engines with several threads, or direct I/O, are faster. What it finds out is whether the
store can be written and read at all, and its order of magnitude.
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spillway_connector.errors import TierError
from spillway_connector.tiers.redis.client.connection import RedisConnection
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.client.router import RedisRouter
from spillway_connector.tiers.redis.names import KEY_PREFIX
from spillway_connector.tiers.s3.names import root_of
from spillway_connector.tiers.s3.place import S3Place

PIECE_BYTES = 1 << 20
PIECES = 32
SECONDS_MAX = 3.0  # of writing; then what was written is read
EXPIRES_MS = 60_000  # if this process ends before it removes them


@dataclass(frozen=True, slots=True)
class TierRates:
    size_bytes: int  # moved in each direction
    write_bytes_per_second: float
    read_bytes_per_second: float


def measure_directory(root: Path) -> TierRates:
    """A file without a name, written to the disk and read from it again. Raises OSError."""
    piece = os.urandom(PIECE_BYTES)
    with tempfile.TemporaryFile(dir=root) as file:
        descriptor = file.fileno()
        began = time.monotonic()
        pieces = _repeat(lambda number: os.pwrite(descriptor, piece, number * PIECE_BYTES), began)
        os.fsync(descriptor)
        written = time.monotonic()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # read from the disk, not from the page cache
        for number in range(pieces):
            os.pread(descriptor, PIECE_BYTES, number * PIECE_BYTES)
        return _rates(pieces, began, written, time.monotonic())


def measure_redis(endpoint: RedisEndpoint, answer_seconds: float) -> TierRates:
    """Keys that the tier's own user may write, which no engine asks for. Raises TierError."""
    router = RedisRouter(endpoint, 1, time.monotonic)
    piece, run = os.urandom(PIECE_BYTES), uuid.uuid4().hex
    target = memoryview(bytearray(PIECE_BYTES))
    tried: list[bytes] = []

    def name(number: int) -> bytes:
        return f"{KEY_PREFIX}:doctor:{run}:{number}".encode()

    def store(number: int) -> None:
        def send(connection: RedisConnection, deadline: float) -> None:
            connection.command(b"SET", name(number), piece, b"PX", b"%d" % EXPIRES_MS, deadline=deadline)

        tried.append(name(number))
        router.run(name(number), send, time.monotonic() + answer_seconds)

    def load(number: int) -> None:
        def receive(connection: RedisConnection, deadline: float) -> None:
            connection.receive_value((b"GET", name(number)), [target], deadline)

        router.run(name(number), receive, time.monotonic() + answer_seconds)

    try:
        began = time.monotonic()
        pieces = _repeat(store, began)
        written = time.monotonic()
        for number in range(pieces):
            load(number)
        return _rates(pieces, began, written, time.monotonic())
    finally:
        try:
            if tried:
                router.attempt([(b"UNLINK", each) for each in tried], time.monotonic() + answer_seconds)
        finally:
            router.close()


def measure_bucket(place: S3Place, answer_seconds: float) -> TierRates:
    """Objects beside the tier's, which no engine asks for. Raises ConfigError, TierError."""
    import obstore  # noqa: PLC0415 - only a tier in a bucket needs it

    from spillway_connector.tiers.s3.client import S3Client  # noqa: PLC0415

    client = S3Client(place, 1)
    piece, run = os.urandom(PIECE_BYTES), uuid.uuid4().hex
    tried: list[int] = []

    async def store(name: str) -> None:
        await obstore.put_async(client.bucket, name, piece, use_multipart=False)

    async def load(name: str) -> None:
        await (await obstore.get_async(client.bucket, name)).bytes_async()

    async def remove(name: str) -> None:
        await obstore.delete_async(client.bucket, name)

    def each(number: int, work: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        name = f"{root_of(place.prefix)}/doctor/{run}/{number}"
        client.run(lambda: work(name), time.monotonic() + answer_seconds)

    def write(number: int) -> None:
        tried.append(number)
        each(number, store)

    try:
        began = time.monotonic()
        pieces = _repeat(write, began)
        written = time.monotonic()
        for number in range(pieces):
            each(number, load)
        return _rates(pieces, began, written, time.monotonic())
    finally:
        try:
            for number in tried:
                each(number, remove)
        except TierError:
            pass  # what went wrong before is the error to report; a lifecycle rule removes the rest
        client.close()


def _repeat(write: Callable[[int], object], began: float) -> int:
    """The number of pieces that were written within SECONDS_MAX, at least one."""
    for number in range(PIECES):
        write(number)
        if time.monotonic() - began > SECONDS_MAX:
            return number + 1
    return PIECES


def _rates(pieces: int, began: float, written: float, read: float) -> TierRates:
    size = pieces * PIECE_BYTES
    return TierRates(size, size / max(1e-9, written - began), size / max(1e-9, read - written))
