"""Real stores, filled by the real tiers and damaged behind their back."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import redis

from spillway_connector.namespace import Namespace
from spillway_connector.tiers.disk.files.tier import FileTier
from spillway_connector.tiers.disk.frame_places import FramePlaces
from spillway_connector.tiers.disk.slab.fingerprint import fingerprints, namespace_words
from spillway_connector.tiers.disk.slab.index import SlabIndex
from spillway_connector.tiers.disk.slab.space import size_class_folders
from spillway_connector.tiers.disk.slab.tier import SlabTier
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.names import RedisNames
from spillway_connector.tiers.redis.tier import RedisTier
from spillway_connector.tiers.tier import NO_TENANT, Tier
from spillway_ctl.nvme_store import NvmeStore
from spillway_ctl.redis_store import RedisStore
from spillway_ctl.store import Store

PAYLOAD_BYTES = 3 * 4096 + 100  # not a whole number of pages
PAGE_BYTES = 4096
FRAME = FramePlaces.of(PAYLOAD_BYTES)  # on a disk
MAX_BYTES = 32 << 20
TENANT = bytes.fromhex("0123456789abcdef")
DATED = ("files", "slab", "redis")  # stores whose blocks can be made older than they are; see conftest.py
ONE = Namespace.of(
    {
        "weights": "hub:acme/small@0123456789abcdef",
        "dtype": "torch.bfloat16",
        "physical_layout": "cpu:amx",
        "groups": [{"block_tokens": 128, "layers": ["a", "b"]}],
        "blocks_per_chunk": 1,
        "parallel": {"tensor": 1, "pipeline": 1},
    }
)
OTHER = Namespace.of({"weights": "weights:fedcba9876543210", "dtype": "torch.float16", "parallel": {"tensor": 2}})


def soon() -> float:
    return time.monotonic() + 30.0


def key_of(seed: int) -> bytes:
    return random.Random(seed + 1_000_000).randbytes(36)


def payload_of(seed: int, size: int = PAYLOAD_BYTES) -> memoryview:
    return memoryview(bytearray(random.Random(seed).randbytes(size)))


class Medium(Protocol):
    """Place in which a tier keeps its frames. ``options``: how the command finds it."""

    options: list[str]

    def tier(self, namespace: Namespace = ONE, *, size: int = PAYLOAD_BYTES) -> Tier: ...

    def store(self) -> Store: ...

    def aged(self, namespace: Namespace, keys: list[bytes], seconds: float) -> AbstractContextManager[None]:
        """Return a context. Chunks that are stored within it under ``keys`` are so many seconds old afterwards."""
        ...

    def overwrite(self, namespace: Namespace, key: bytes, offset: int, new: bytes) -> None:
        """Overwrite bytes of a frame; offsets below 192 are of the header, those from PAGE_BYTES on of the payload."""
        ...


def place_of(offset: int) -> int:
    """Place of a frame's offset on a disk."""
    return FRAME.header_at + offset if offset < 192 else FRAME.payload_at + offset - PAGE_BYTES


class _Directory:
    kind: Callable[..., Tier]

    def __init__(self, root: Path) -> None:
        self.root = root
        self.options = ["--nvme", str(root)]

    def tier(self, namespace: Namespace = ONE, *, size: int = PAYLOAD_BYTES) -> Tier:
        return type(self).kind(namespace, size, self.root, max_bytes=MAX_BYTES)

    def store(self) -> Store:
        return NvmeStore(self.root)


class FileMedium(_Directory):
    kind = FileTier

    @contextmanager
    def aged(self, namespace: Namespace, keys: list[bytes], seconds: float) -> Iterator[None]:
        yield
        for key in keys if seconds else []:
            used_s = time.time() - seconds
            os.utime(self.path(namespace, key), (used_s, used_s))

    def path(self, namespace: Namespace, key: bytes) -> Path:
        name = key.hex()
        return self.root / namespace.hex / name[:2] / name[2:4] / f"{name}.kv"

    def overwrite(self, namespace: Namespace, key: bytes, offset: int, new: bytes) -> None:
        with self.path(namespace, key).open("r+b") as file:
            file.seek(place_of(offset))
            file.write(new)


class SlabMedium(_Directory):
    kind = SlabTier

    @contextmanager
    def aged(self, namespace: Namespace, keys: list[bytes], seconds: float) -> Iterator[None]:
        yield
        if seconds:
            [folder] = size_class_folders(self.root)
            index = SlabIndex.open(folder, writable=True)
            assert index is not None
            for slot in index.find(fingerprints(keys, namespace_words(namespace.digest16))).tolist():
                index.put("used_s", slot, int(time.time() - seconds))

    def overwrite(self, namespace: Namespace, key: bytes, offset: int, new: bytes) -> None:
        wanted = (namespace.digest16, key)
        [frame] = [found for found in self.store().frames(headers=True) if (found.namespace, found.key) == wanted]
        name, _, start = frame.place.partition("@")
        with (self.root / name).open("r+b") as file:
            file.seek(int(start) + place_of(offset))
            file.write(new)


class RedisMedium:
    def __init__(self, port: int) -> None:
        self.port = port
        self.client = redis.Redis(port=port)
        self.client.flushall()
        self.seconds_behind = 0.0  # the tiers' clock
        self.options = ["--redis", f"redis://127.0.0.1:{port}/0"]

    def tier(self, namespace: Namespace = ONE, *, size: int = PAYLOAD_BYTES) -> Tier:
        endpoint = RedisEndpoint(port=self.port)
        return RedisTier(namespace, size, endpoint, wall_clock=lambda: time.time() - self.seconds_behind)

    @contextmanager
    def aged(self, namespace: Namespace, keys: list[bytes], seconds: float) -> Iterator[None]:
        self.seconds_behind = seconds
        yield
        self.seconds_behind = 0.0

    def store(self) -> Store:
        return RedisStore(RedisEndpoint(port=self.port))

    def overwrite(self, namespace: Namespace, key: bytes, offset: int, new: bytes) -> None:
        where = offset if offset < 192 else offset - PAGE_BYTES + 192
        self.client.setrange(RedisNames(namespace.hex).block(key), where, new)


def fill(
    medium: Medium,
    seeds: Iterable[int],
    namespace: Namespace = ONE,
    *,
    tenant: bytes = NO_TENANT,
    age_seconds: float = 0.0,
) -> None:
    seeds = list(seeds)
    with medium.aged(namespace, [key_of(seed) for seed in seeds], age_seconds):
        tier = medium.tier(namespace)
        for seed in seeds:
            tier.store(key_of(seed), payload_of(seed), soon(), tenant)
        tier.close()


def left(medium: Medium, seeds: Iterable[int], namespace: Namespace = ONE) -> list[int]:
    """Return those of ``seeds`` that a tier still serves, byte for byte."""
    tier = medium.tier(namespace)
    seeds = list(seeds)
    there = [seed for seed, found in zip(seeds, tier.contains([key_of(seed) for seed in seeds], soon())) if found]
    for seed in there:
        target = memoryview(bytearray(PAYLOAD_BYTES))
        tier.load(key_of(seed), target, soon())
        assert target == payload_of(seed)
    tier.close()
    return there
