"""The way from one configured tier to an open backend."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.tiering.base import JobMetadata

from spillway_connector.config import parse_tier
from spillway_connector.engine.requests.tenancy import TenantContext
from spillway_connector.engine.shared_tiers.open_tier import open_tier
from spillway_connector.engine.v023.stats import SpillwayStats
from spillway_connector.engine.v023.tier_adapter import SharedTierAdapter
from spillway_connector.errors import ConfigError
from spillway_connector.namespace import Namespace
from spillway_connector.plan.sessions import SessionHint, session_tag
from spillway_connector.tiers.disk import io as disk_io
from spillway_connector.tiers.disk.page_cache import supports_page_cache
from spillway_connector.tiers.disk.slab.session_file import open_sessions

PAYLOAD_BYTES = 8192
NAMESPACE = Namespace.of({"model": "test"})
KEY = b"k" * 32 + b"\0" * 4


def round_trip(tier, payload: bytes) -> bytes:
    deadline = time.monotonic() + 60
    tier.store(KEY, memoryview(payload), deadline)
    target = memoryview(bytearray(PAYLOAD_BYTES))
    tier.load(KEY, target, deadline)
    return bytes(target)


@pytest.mark.parametrize("mode", ["files", "slab", "auto"])
def test_a_directory(tmp_path: Path, mode: str):
    tier = open_tier(parse_tier("nvme", {"path": str(tmp_path), "mode": mode}), NAMESPACE, PAYLOAD_BYTES)
    payload = os.urandom(PAYLOAD_BYTES)
    assert round_trip(tier, payload) == payload
    tier.close()


@pytest.mark.parametrize("page_cache", ["auto", "off"])
def test_blocks_stay_in_the_page_cache_unless_that_is_off(
    tmp_path: Path, page_cache: str, monkeypatch: pytest.MonkeyPatch
):
    if not (disk_io.supports_direct(tmp_path) and supports_page_cache(tmp_path)):
        pytest.skip("needs Linux 6.5 and a file system with direct I/O")
    monkeypatch.setattr(disk_io.IdleMemory, "enough", True)
    config = parse_tier("nvme", {"path": str(tmp_path / "kv"), "mode": "slab", "page_cache": page_cache})
    tier = open_tier(config, NAMESPACE, PAYLOAD_BYTES)
    payload = os.urandom(PAYLOAD_BYTES)
    assert round_trip(tier, payload) == payload
    assert (tier.in_memory(KEY, time.monotonic() + 60) is not None) == (page_cache == "auto")
    tier.close()


@pytest.mark.parametrize(("mode", "reason"), [("auto", "the directory holds frames in it"), ("slab", "as asked for")])
def test_the_log_names_the_layout_and_unused_ones(tmp_path: Path, mode: str, reason: str, caplog):
    for folder in ("slab", "0a" * 16 + "/partial"):
        (tmp_path / folder).mkdir(parents=True)
    with caplog.at_level("INFO", logger="spillway_connector"):
        open_tier(parse_tier("nvme", {"path": str(tmp_path), "mode": mode}), NAMESPACE, PAYLOAD_BYTES).close()
    assert f"NVMe tier {tmp_path}: layout slab" in caplog.text and reason in caplog.text
    assert "it also holds blocks in the layout files, which this engine neither uses nor removes" in caplog.text


def test_an_encrypted_directory_holds_no_plain_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SEAL", "ab" * 32)
    options = {"path": str(tmp_path / "kv"), "encryption": {"key_id": "2026-a", "key_env": "SEAL"}}
    tier = open_tier(parse_tier("nvme", options), NAMESPACE, PAYLOAD_BYTES)
    payload = b"a conversation  " * (PAYLOAD_BYTES // 16)
    assert round_trip(tier, payload) == payload
    tier.close()
    stored = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert stored
    assert not any(b"conversation" in content for content in stored)


def test_a_login_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CACHE_PASSWORD", raising=False)
    config = parse_tier("redis", {"url": "redis://127.0.0.1:1/0", "password_env": "CACHE_PASSWORD"})
    with pytest.raises(ConfigError, match="CACHE_PASSWORD"):
        open_tier(config, NAMESPACE, PAYLOAD_BYTES)


def test_a_login_variable_counts_without_the_line_end_behind_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CACHE_PASSWORD", " secret \r\n")
    monkeypatch.setattr("spillway_connector.tiers.redis.tier.RedisTier", lambda space, size, endpoint, **_: endpoint)
    config = parse_tier("redis", {"url": "redis://127.0.0.1:1/0", "password_env": "CACHE_PASSWORD"})

    assert open_tier(config, NAMESPACE, PAYLOAD_BYTES).password == " secret "


def test_a_server_that_is_away_is_no_error_at_the_start():
    tier = open_tier(parse_tier("redis", {"url": "redis://127.0.0.1:1/0"}), NAMESPACE, PAYLOAD_BYTES)
    assert tier.name == "redis"
    tier.close()


def test_a_session_reaches_the_slabs_of_the_node(tmp_path: Path):
    """The session goes through the manager's own calls, and the file beside the index has its row."""
    rows = memoryview(bytearray(8 * PAYLOAD_BYTES))
    geometry = SimpleNamespace(payload_bytes=PAYLOAD_BYTES, row_bytes=PAYLOAD_BYTES)
    spec = SimpleNamespace(geometry=geometry, namespace=NAMESPACE, announces_blocks=False)
    adapter = SharedTierAdapter(spec, rows, "nvme", path=str(tmp_path), mode="slab", max_bytes=64 * PAYLOAD_BYTES)
    try:
        context = TenantContext("turn", tenant=b"tenant-1", session=SessionHint(b"agent", return_seconds=30.0))
        keys = [number.to_bytes(36, "big") for number in range(3)]
        adapter.begin_request(context)
        adapter.use_session(keys, context)
        adapter.submit_store(JobMetadata(1, keys, np.arange(3), False, context))
        while not adapter.get_finished_jobs():
            assert adapter._shared.wait_for_progress(30.0)
        adapter.use_session(keys, context)
        adapter.end_request(context)
        tier = adapter._shared._tier
        tier.maintain(time.monotonic() + 30.0)
        index = tier._size_class.last_used().index
        sessions = open_sessions(tier._folder, index)
        order = sessions.order
        row = order.find(int.from_bytes(b"tenant-1", "little"), int.from_bytes(session_tag(context.session), "little"))
        number = order._arrays.row_number[row]
        held = np.flatnonzero(order._arrays.slot_session == number)
        assert sorted(order._arrays.slot_place[held].tolist()) == [0, 1, 2]
        assert order.is_expected(int(held[0]), tier._now_s())
        before = order._arrays.row_changes[0]
        plain = ReqContext(req_id="no session")
        adapter.begin_request(plain)
        adapter.use_session(keys, plain)
        adapter.end_request(plain)
        tier.maintain(time.monotonic() + 30.0)
        sessions.columns.reload()
        assert order._arrays.row_changes[0] == before
    finally:
        adapter.shutdown()


def test_what_was_evicted_is_reported_by_reason(tmp_path: Path):
    rows = memoryview(bytearray(8 * PAYLOAD_BYTES))
    geometry = SimpleNamespace(payload_bytes=PAYLOAD_BYTES, row_bytes=PAYLOAD_BYTES)
    spec = SimpleNamespace(geometry=geometry, namespace=NAMESPACE, announces_blocks=False)
    adapter = SharedTierAdapter(spec, rows, "nvme", path=str(tmp_path), max_bytes=8 * PAYLOAD_BYTES)
    try:
        for number in range(40):
            keys = [number.to_bytes(36, "big")]
            context = ReqContext(req_id="writer")
            adapter.count_request(keys)
            adapter.count_request(keys)  # a full tier takes what was asked for before
            adapter.submit_store(JobMetadata(number, keys, np.array([number % 8]), False, context))
            while not adapter.get_finished_jobs():
                assert adapter._shared.wait_for_progress(30.0)
        stats = SpillwayStats()
        adapter.report.add_to(stats)
        evicted = stats.reduce()["tier_evicted_frames|nvme|room"]
        assert evicted == adapter._shared.snapshot().evictions["room"] >= 30
        again = SpillwayStats()
        adapter._shared.counters.moved = True
        adapter.report.add_to(again)
        assert "tier_evicted_frames|nvme|room" not in again.reduce(), "reported once"
    finally:
        adapter.shutdown()
