from __future__ import annotations

import json

import pytest
from ctl_media import (
    DATED,
    FRAME,
    ONE,
    OTHER,
    PAGE_BYTES,
    TENANT,
    FileMedium,
    Medium,
    RedisMedium,
    SlabMedium,
    fill,
    key_of,
    left,
    soon,
)

from spillway_connector.tiers.inspection import Removal
from spillway_ctl.command import main


def purge(capsys: pytest.CaptureFixture[str], medium: Medium, *arguments: str) -> dict[str, object]:
    status = main(["tier", "purge", *medium.options, *arguments, "--json"])
    out = capsys.readouterr().out
    assert status == 0
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def test_a_dry_run_counts_and_removes_nothing(medium: Medium, capsys: pytest.CaptureFixture[str]) -> None:
    fill(medium, range(4))
    found = purge(capsys, medium, "--all", "--dry-run")
    assert (found["matched_frames"], found["removed_frames"], found["dry_run"]) == (4, 0, True)
    assert left(medium, range(4)) == [0, 1, 2, 3]


def test_one_tenant_goes_and_no_other(medium: Medium, capsys: pytest.CaptureFixture[str]) -> None:
    fill(medium, range(4))
    fill(medium, range(4, 7), tenant=TENANT)
    fill(medium, [7], tenant=bytes.fromhex("ff00ff00ff00ff00"))
    found = purge(capsys, medium, "--tenant", TENANT.hex(), "--yes")
    assert found["removed_frames"] == 3
    assert left(medium, range(8)) == [0, 1, 2, 3, 7]


def test_one_namespace_goes_and_no_other(medium: Medium, capsys: pytest.CaptureFixture[str]) -> None:
    fill(medium, range(3))
    fill(medium, range(4), OTHER)
    assert purge(capsys, medium, "--namespace", ONE.hex[:8], "--yes")["removed_frames"] == 3
    assert left(medium, range(3)) == [] and left(medium, range(4), OTHER) == [0, 1, 2, 3]


@pytest.mark.parametrize("medium", DATED, indirect=True)
def test_the_old_go_and_the_young_stay(medium: Medium, capsys: pytest.CaptureFixture[str]) -> None:
    fill(medium, range(3), age_seconds=8 * 86_400)
    fill(medium, range(3, 5))
    assert purge(capsys, medium, "--older-than", "7d", "--yes")["removed_frames"] == 3
    assert left(medium, range(5)) == [3, 4]


def test_everything_goes_and_the_tier_goes_on(medium: Medium, capsys: pytest.CaptureFixture[str]) -> None:
    fill(medium, range(300))
    fill(medium, range(3), OTHER)
    assert purge(capsys, medium, "--all", "--yes")["removed_frames"] == 303
    assert left(medium, range(300)) == []
    fill(medium, range(5))
    assert left(medium, range(5)) == [0, 1, 2, 3, 4]


def test_damaged_frames_of_a_namespace_go_too(medium: Medium, capsys: pytest.CaptureFixture[str]) -> None:
    fill(medium, range(3))
    medium.overwrite(ONE, key_of(1), 40, b"\x00\x00\x00\x00")
    assert purge(capsys, medium, "--namespace", ONE.hex, "--yes")["removed_frames"] == 3


@pytest.mark.parametrize("medium", ["files", "slab", "redis"], indirect=True)  # S3 does not say what was there
def test_what_is_gone_since_the_walk_does_not_count(medium: Medium) -> None:
    fill(medium, range(7))
    store = medium.store()
    seen = list(store.frames(headers=True))
    sizes = sum(frame.stored_bytes for frame in seen)
    first, last = store.remove(seen[2:5], only_unused=False), store.remove(seen, only_unused=False)
    assert (first.frames, last.frames) == (3, 4)
    assert first.stored_bytes + last.stored_bytes == sizes
    assert store.remove(seen, only_unused=False) == Removal()
    store.close()


def test_what_was_used_since_the_walk_is_kept(directory: FileMedium | SlabMedium) -> None:
    fill(directory, range(2), age_seconds=8 * 86_400)
    store = directory.store()
    seen = list(store.frames(headers=False))
    assert left(directory, [0]) == [0]  # a load, which renews its age
    assert store.remove(seen, only_unused=True).frames == 1
    assert left(directory, range(2)) == [0]
    store.close()


def test_what_was_replaced_since_the_walk_is_kept(directory: FileMedium | SlabMedium) -> None:
    fill(directory, [1])
    store = directory.store()
    directory.overwrite(ONE, key_of(1), PAGE_BYTES + 1, b"spoiled")
    seen = list(store.frames(headers=True))
    assert store.remove(seen, only_unused=True).frames == 1
    fill(directory, [1])
    assert store.remove(seen, only_unused=True).frames == 0
    assert left(directory, [1]) == [1]
    store.close()


def test_the_ledger_and_the_index_agree_with_what_is_left(
    directory: FileMedium | SlabMedium, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(directory, range(40))
    purge(capsys, directory, "--namespace", ONE.hex[:4], "--yes")
    fill(directory, range(10))
    tier = directory.tier()
    assert tier.resident_bytes(soon()) == 10 * FRAME.frame_bytes
    tier.close()


def test_a_purged_slot_is_not_found_by_a_rebuilt_index(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    slabs = SlabMedium(tmp_path / "tier")
    fill(slabs, range(4), tenant=TENANT)
    fill(slabs, range(4, 6))
    purge(capsys, slabs, "--tenant", TENANT.hex(), "--yes")
    next(slabs.root.glob("slab/*/index")).unlink()
    assert left(slabs, range(6)) == [4, 5]


def test_in_redis_nothing_is_left_of_a_namespace(valkey, capsys: pytest.CaptureFixture[str]) -> None:
    medium = RedisMedium(valkey.port)
    fill(medium, range(3))
    fill(medium, range(3), OTHER)
    medium.client.set("somebody-else", "keeps this")
    purge(capsys, medium, "--namespace", ONE.hex, "--yes")
    names = {name.decode() for name in medium.client.scan_iter()}
    assert not [name for name in names if ONE.hex in name]
    assert f"spillway1:{OTHER.hex}:document" in names and "somebody-else" in names and len(names) == 5
