"""Spillway's tiers under vLLM's own tiering manager, over real files and a real Valkey.

vLLM's manager asserts that each job is reported, once, and by the tier that was given it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from spillway_connector.engine.stock import tiers as stock_tiers_module
from spillway_connector.errors import ConfigError
from spillway_connector.testing.faults import HangingTier
from spillway_connector.testing.sick_server import SickServer
from spillway_connector.transfer.stats import Operation
from stock_tiers.patience import PATIENT
from stock_tiers.scheduler_side import SchedulerSide, build_model, cache_config, key, row_bytes_of

Tier = Mapping[str, Any]
Open = Callable[..., SchedulerSide]
WAIT_SECONDS = 120.0
ROWS = 8


def until(side: SchedulerSide, condition: Callable[[], bool], what: str) -> None:
    """Step the scheduler until the condition holds."""
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, what
        side.step()
        time.sleep(0.005)


def settle(side: SchedulerSide) -> None:
    until(side, lambda: not side.manager.has_pending_work(), "jobs are still under way")


def evict(side: SchedulerSide) -> None:
    """Fill the CPU tier with other chunks."""
    side.store("others", range(1000, 1000 + ROWS))
    settle(side)


def look_up(side: SchedulerSide, context: ReqContext, numbers: range) -> list[LookupResult]:
    """Ask step by step, as the scheduler does for a waiting request, until each answer is final."""
    found: list[LookupResult] = []

    def final() -> bool:
        found[:] = [side.manager.lookup(key(number), context) for number in numbers]
        return all(answer in (LookupResult.HIT, LookupResult.MISS) for answer in found)

    until(side, final, f"the answers stay {found}")
    return found


def stored(side: SchedulerSide, numbers: range) -> None:
    side.store("writer", numbers)
    settle(side)
    evict(side)
    assert not any(side.in_cpu_tier(number) for number in numbers)


def samples(side: SchedulerSide) -> dict[str, Any]:
    stats = side.manager.get_stats()
    return {} if stats is None else stats.reduce()


def test_what_was_evicted_comes_back_byte_for_byte(tier: Tier, open_side: Open) -> None:
    side = open_side(tier, rows=ROWS)
    stored(side, range(4))
    reader = side.request("reader")
    assert look_up(side, reader, range(5)) == [LookupResult.HIT] * 4 + [LookupResult.MISS]
    for number in range(4):
        assert side.row_of(number, reader) == row_bytes_of(number, side.row_bytes)


def test_another_engine_of_the_same_model_finds_it(tier: Tier, open_side: Open) -> None:
    first = open_side(tier, rows=ROWS)
    first.store("writer", range(3))
    settle(first)
    # More of both memories, another engine id: none of it is in the bytes.
    second = open_side(tier, rows=2 * ROWS, caches=cache_config(device_blocks=64))
    reader = second.request("reader")
    assert look_up(second, reader, range(3)) == [LookupResult.HIT] * 3
    assert second.row_of(2, reader) == row_bytes_of(2, second.row_bytes)


def test_an_engine_of_other_weights_does_not(tier: Tier, open_side: Open, tmp_path: Path) -> None:
    first = open_side(tier, rows=ROWS)
    first.store("writer", range(3))
    settle(first)
    other = open_side(tier, rows=ROWS, model=build_model(tmp_path / "other", b"other weights"))
    assert look_up(other, other.request("reader"), range(3)) == [LookupResult.MISS] * 3


def test_weights_that_change_have_a_name_from_a_restart_on_and_an_earlier_name_finds_its_chunks(
    tier: Tier, open_side: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Spillway's connector is given a name while the engine runs; vLLM's own has no call that says it to tiers."""
    first = open_side(tier, rows=ROWS, extra={"weights_version": "one"})
    first.store("writer", range(3))
    settle(first)
    first.manager.reset_cache()  # as before the weights change in place
    assert "restart it with a weights_version" in caplog.text
    first.store("of two", range(4, 7))
    settle(first)
    for version in ("two", "one"):
        other = open_side(tier, rows=ROWS, extra={"weights_version": version})
        found = look_up(other, other.request("reader"), range(7))
        of_one = [LookupResult.HIT] * 3 + [LookupResult.MISS] * 4
        assert found == (of_one if version == "one" else [LookupResult.MISS] * 7)


def test_an_engine_whose_weights_are_unknown_serves_without_the_tier(
    tier: Tier, open_side: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_model(tmp_path / "unknown", b"weights")
    for file in model.glob("*.safetensors"):
        file.unlink()
    side = open_side(tier, rows=ROWS, model=model)
    stored(side, range(3))
    assert look_up(side, side.request("reader"), range(3)) == [LookupResult.MISS] * 3
    assert "rests: model" in caplog.text and "holds no file of weights" in caplog.text


def test_by_class_name_and_module_path(open_side: Open, tmp_path: Path) -> None:
    entry = {
        "type": "SpillwayNvmeTier",
        "module_path": "spillway_connector.engine.stock.tiers",
        "path": str(tmp_path / "kv"),
        "max_bytes": "64 MiB",
        **PATIENT,
    }
    side = open_side(entry, rows=ROWS)
    stored(side, range(2))
    assert look_up(side, side.request("reader"), range(2)) == [LookupResult.HIT] * 2


def test_a_damaged_frame_is_a_miss_and_the_others_of_its_job_are_hits(open_side: Open, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    side = open_side({"type": "spillway-nvme", "path": str(folder), "mode": "files", **PATIENT}, rows=ROWS)
    stored(side, range(4))
    (frame,) = [path for path in folder.rglob("*") if path.is_file() and key(2).hex() in path.as_posix()]
    content = bytearray(frame.read_bytes())
    content[len(content) // 2] ^= 1
    frame.write_bytes(content)
    reader = side.request("reader")
    answers = look_up(side, reader, range(4))
    assert answers == [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS, LookupResult.HIT]
    for number in (0, 1, 3):
        assert side.row_of(number, reader) == row_bytes_of(number, side.row_bytes)
    seen = samples(side)
    assert seen["spillway_tier_failures:('spillway-nvme', 'load', 'payload')"] == 1
    assert seen["spillway_tier_read_bytes:('spillway-nvme',)"] == 3 * side.row_bytes, "none of them is read again"


def test_a_server_that_is_killed_costs_misses_only(open_side: Open, own_valkey: Callable[[], Any]) -> None:
    server = own_valkey()
    limits = PATIENT | {"lookup_timeout_seconds": 0.5, "load_timeout_seconds": 0.5, "store_timeout_seconds": 0.5}
    entry = {"type": "spillway-redis", "url": f"redis://127.0.0.1:{server.port}/0", **limits}
    side = open_side(entry, rows=ROWS)
    side.store("writer", range(4))
    settle(side)
    server.stop()
    evict(side)  # its stores fail
    assert look_up(side, side.request("reader"), range(4)) == [LookupResult.MISS] * 4
    settle(side)


def test_a_server_that_never_answers_costs_misses_only(open_side: Open) -> None:
    limits = {"lookup_timeout_seconds": 0.2, "load_timeout_seconds": 0.2, "store_timeout_seconds": 0.2}
    with SickServer([[]]) as server:
        entry = {"type": "spillway-redis", "url": f"redis://127.0.0.1:{server.port}/0", **limits}
        side = open_side(entry, rows=ROWS)
        side.store("writer", range(4))
        assert look_up(side, side.request("reader"), range(8, 12)) == [LookupResult.MISS] * 4
        settle(side)
        side.close()
        side.close = lambda: None  # type: ignore[method-assign]


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Operation], None]]:
    """Tiers opened after its call hang in that operation, until the test has ended."""
    opened: list[HangingTier] = []

    def hang(operation: Operation) -> None:
        real = stock_tiers_module.open_tier

        def open_hanging(*given: Any) -> HangingTier:
            opened.append(HangingTier(real(*given), [operation]))
            return opened[-1]

        monkeypatch.setattr(stock_tiers_module, "open_tier", open_hanging)

    yield hang
    for tier in opened:
        tier.release()


@pytest.mark.parametrize("operation", list(Operation))
def test_a_call_that_hangs_ends_at_its_deadline(
    open_side: Open, tmp_path: Path, hanging: Callable[[Operation], None], operation: Operation
) -> None:
    entry = {"type": "spillway-nvme", "path": str(tmp_path / "kv"), "max_bytes": "64 MiB"}
    healthy = open_side({**entry, **PATIENT}, rows=ROWS)
    healthy.store("writer", range(4))
    settle(healthy)
    hanging(operation)
    limits = {"lookup_timeout_seconds": 0.5, "load_timeout_seconds": 0.5, "store_timeout_seconds": 0.5}
    side = open_side({**entry, **PATIENT, **limits}, rows=ROWS)
    if operation is Operation.STORE:
        side.store("writer", range(20, 24))
    else:
        assert look_up(side, side.request("reader"), range(4)) == [LookupResult.MISS] * 4
    settle(side)


def test_a_reset_waits_for_threads_and_then_the_tier_rests(
    open_side: Open, tmp_path: Path, hanging: Callable[[Operation], None]
) -> None:
    entry = {"type": "spillway-nvme", "path": str(tmp_path / "kv"), "max_bytes": "64 MiB", **PATIENT}
    side = open_side(entry, rows=ROWS)
    side.store("writer", range(4))
    settle(side)
    hanging(Operation.STORE)
    sick = open_side({**entry, "load_timeout_seconds": 0.5, "store_timeout_seconds": 0.5}, rows=ROWS)
    sick.store("writer", range(20, 24))
    for reset in (side, sick):
        reset.manager.reset_cache()  # asserts that all jobs were reported
        assert not reset.manager.has_pending_work()
        assert look_up(reset, reset.request("reader"), range(4)) == [LookupResult.MISS] * 4, "of other weights, maybe"
        reset.store("again", range(30, 32))
        settle(reset)
        assert samples(reset)["spillway_tier_weights_changed:('spillway-nvme',)"] == 1


def test_a_shutdown_in_the_middle_of_jobs_releases_the_rows(
    open_side: Open, tmp_path: Path, hanging: Callable[[Operation], None]
) -> None:
    hanging(Operation.STORE)
    side = open_side({"type": "spillway-nvme", "path": str(tmp_path / "kv"), "max_bytes": "64 MiB"}, rows=ROWS)
    region = side.manager.primary_tier._mmap_region
    side.store("writer", range(4))
    side.close()
    side.close = lambda: None  # type: ignore[method-assign]
    assert region.mmap_obj is None, "the mapping could be closed: nothing refers to it any more"


def test_a_quota_counts_by_cache_salt(open_side: Open, tmp_path: Path) -> None:
    entry = {"type": "spillway-nvme", "path": str(tmp_path / "kv"), "mode": "files", "max_bytes": "64 MiB", **PATIENT}
    plain = open_side(entry, rows=ROWS)
    frame_bytes = plain.row_bytes + 4096
    plain.close()
    plain.close = lambda: None  # type: ignore[method-assign]
    side = open_side({**entry, "tenant_max_bytes": 3 * frame_bytes}, rows=ROWS)
    for number in range(8):
        for salt in ("loud", "quiet") if number == 0 else ("loud",):
            side.store(f"{salt}-{number}", [number if salt == "loud" else 100], cache_salt=salt)
            settle(side)
    evict(side)
    assert look_up(side, side.request("reader"), range(100, 101)) == [LookupResult.HIT], "the quiet one keeps its own"
    kept = look_up(side, side.request("loud"), range(8)).count(LookupResult.HIT)
    assert 1 <= kept <= 3
    assert samples(side)["spillway_tier_evicted_frames:('spillway-nvme', 'tenant')"] >= 5


def test_an_encrypted_directory_holds_no_plain_byte(
    open_side: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEAL", "ab" * 32)
    entry = {"type": "spillway-nvme", "path": str(tmp_path / "kv"), "mode": "files", **PATIENT}
    side = open_side({**entry, "encryption": {"key_id": "2026-a", "key_env": "SEAL"}}, rows=ROWS)
    stored(side, range(2))
    piece = row_bytes_of(1, side.row_bytes)[:64]
    contents = [path.read_bytes() for path in (tmp_path / "kv").rglob("*") if path.is_file()]
    assert sum(len(content) for content in contents) >= 2 * side.row_bytes
    assert not any(piece in content for content in contents)
    reader = side.request("reader")
    assert look_up(side, reader, range(2)) == [LookupResult.HIT] * 2
    assert side.row_of(1, reader) == row_bytes_of(1, side.row_bytes)


def test_every_sample_has_its_metric(tier: Tier, open_side: Open) -> None:
    side = open_side(tier, rows=ROWS)
    stored(side, range(2))
    look_up(side, side.request("reader"), range(3))
    definitions = TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [dict(tier)]})
    stats = side.tiers[0].get_stats()
    assert stats is not None
    values = stats.data["data"]
    assert "spillway_tier_read_bytes" in values and values["spillway_tier_read_bytes"][(tier["type"],)] > 0
    for name, by_labels in values.items():
        for labels in by_labels:
            assert len(labels) == len(definitions[name].labelnames), name


def test_what_requests_may_choose_tiers_by(tier: Tier, open_side: Open) -> None:
    side = open_side(tier, {**tier, "locality": "REMOTE"}, rows=ROWS)
    own, said = side.tiers
    assert own.medium is Medium.STORAGE
    assert own.locality is (Locality.LOCAL if tier["type"] == "spillway-nvme" else Locality.REMOTE)
    assert said.locality is Locality.REMOTE
    with pytest.raises(ConfigError, match="locality: 'here' is not one of LOCAL, REMOTE"):
        open_side({**tier, "locality": "here"}, rows=ROWS)


@pytest.mark.skipif("transfer_bytes" not in JobResult.__dataclass_fields__, reason="this vLLM has no backpressure")
def test_vllms_backpressure_sees_the_stores(tier: Tier, open_side: Open) -> None:
    side = open_side({**tier, "backpressure": {"backpressure_cls": "EMABackpressureDetector"}}, rows=ROWS)
    side.store("writer", range(4))
    settle(side)
    assert side.tiers[0].bp_detector._completions == 1
    side.manager.primary_tier.reset_cache()
    side.store("writer", range(4))  # there already: nothing is moved, so nothing is measured
    settle(side)
    assert side.tiers[0].bp_detector._completions == 1


def test_a_wrong_setting_is_named(open_side: Open, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_byte"):
        open_side({"type": "spillway-nvme", "path": str(tmp_path), "max_byte": 1}, rows=ROWS)
