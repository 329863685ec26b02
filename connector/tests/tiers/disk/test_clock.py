from __future__ import annotations

from pathlib import Path

import pytest

from spillway_connector.testing.clock import SteppedClock
from spillway_connector.tiers.disk.clock import AgeClock, boot_tag

DAY_SECONDS = 86_400


def _age_clock(root: Path, clock: SteppedClock, wall: float) -> AgeClock:
    return AgeClock(root, clock, lambda: wall)


def test_processes_of_one_boot_tell_the_same_age(tmp_path: Path) -> None:
    clock = SteppedClock()
    first = _age_clock(tmp_path, clock, 1_000_000.0)
    first.share()
    clock.advance(50)
    second = _age_clock(tmp_path, clock, 9_000_000.0)  # the wall clock has jumped
    assert second.now_s() == 9_000_000
    second.share()
    assert first.now_s() == second.now_s() == 1_000_050
    assert first.now_ns() == second.now_ns() == round(first.now() * 1e9)


def test_a_new_boot_begins_with_its_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _age_clock(tmp_path, SteppedClock(), 1_000_000.0).share()
    monkeypatch.setattr("spillway_connector.tiers.disk.clock.boot_tag", lambda: "of another boot!")
    later = _age_clock(tmp_path, SteppedClock(3.0), 2_000_000.0)
    later.share()
    assert later.now_s() == 2_000_000
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("damage", ["empty", "noise", "bit", "future"])
def test_an_invalid_setting_is_ignored(tmp_path: Path, damage: str) -> None:
    _age_clock(tmp_path, SteppedClock(5000.0), 1_000_000.0).share()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    damaged = {"empty": b"", "noise": b"x" * len(whole), "bit": whole[:9] + bytes([whole[9] ^ 1]) + whole[10:]}
    path.write_bytes(damaged.get(damage, whole))
    clock = SteppedClock(100.0 if damage == "future" else 6000.0)  # a setting ahead of us is of another machine
    ours = _age_clock(tmp_path, clock, 3_000_000.0)
    ours.share()
    assert ours.now_s() == 3_000_000


def test_without_a_place_or_a_boot_the_clock_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for root in (tmp_path / "missing", tmp_path):
        ours = _age_clock(root, SteppedClock(), 7_000.0)
        ours.share()
        assert ours.now_s() == 7_000
        monkeypatch.setattr("spillway_connector.tiers.disk.clock.boot_tag", lambda: None)
    assert list(tmp_path.iterdir()) == []


def test_settings_of_boots_long_past_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _age_clock(tmp_path, SteppedClock(), 1_000_000.0).share()
    (old,) = tmp_path.iterdir()
    monkeypatch.setattr("spillway_connector.tiers.disk.clock.boot_tag", lambda: "of another boot!")
    _age_clock(tmp_path, SteppedClock(), old.stat().st_mtime + 100 * DAY_SECONDS).share()
    assert not old.exists()


def test_the_tag_is_of_this_boot() -> None:
    tag = boot_tag()
    assert tag is not None
    assert tag == boot_tag()
    assert len(bytes.fromhex(tag)) == 8
