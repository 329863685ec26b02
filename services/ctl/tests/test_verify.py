from __future__ import annotations

import json

import pytest
from ctl_media import (
    DATED,
    FRAME,
    ONE,
    OTHER,
    PAGE_BYTES,
    PAYLOAD_BYTES,
    TENANT,
    FileMedium,
    Medium,
    SlabMedium,
    fill,
    key_of,
    left,
)

from spillway_ctl.command import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["tier", "verify", *arguments])
    return status, capsys.readouterr().out


def test_whole_frames_pass(medium: Medium, capsys: pytest.CaptureFixture[str]) -> None:
    fill(medium, range(6))
    fill(medium, range(2), OTHER, tenant=TENANT)
    status, out = run(capsys, *medium.options)
    assert status == 0 and "verified 8 frames" in out and "none damaged" in out


def test_damage_anywhere_is_found_named_and_left_alone(medium: Medium, capsys: pytest.CaptureFixture[str]) -> None:
    fill(medium, range(6))
    medium.overwrite(ONE, key_of(1), PAGE_BYTES + PAYLOAD_BYTES - 1, b"\x00\x00"[:1])
    medium.overwrite(ONE, key_of(2), PAGE_BYTES + 100, b"\x01\x02\x03\x04")
    medium.overwrite(ONE, key_of(3), 0, b"X")
    medium.overwrite(ONE, key_of(4), 180, b"\x00\x00\x00\x00")
    status, out = run(capsys, *medium.options, "--json")
    found = json.loads(out)
    assert status == 1
    assert found["damage"] == {"payload": 2, "magic": 1, "header": 1} and found["frames"] == 6
    assert found["damaged_frames"] == len(found["damaged"]) == 4 and found["removed_frames"] == 0
    assert {entry["damage"] for entry in found["damaged"]} == {"payload", "magic", "header"}
    assert run(capsys, *medium.options)[1].count("damaged  ") == 4


def test_damage_is_removed_on_request_and_the_rest_stays(medium: Medium, capsys: pytest.CaptureFixture[str]) -> None:
    fill(medium, range(6))
    for seed in (1, 4):
        medium.overwrite(ONE, key_of(seed), PAGE_BYTES + 5, b"spoiled")
    status, out = run(capsys, *medium.options, "--remove-damaged")
    assert status == 1 and "2 removed" in out and out.count("; removed") == 2
    assert left(medium, range(6)) == [0, 2, 3, 5]
    assert run(capsys, *medium.options)[0] == 0
    fill(medium, range(6))
    assert left(medium, range(6)) == list(range(6))


@pytest.mark.parametrize("medium", DATED, indirect=True)
def test_filters_narrow_what_is_read(medium: Medium, capsys: pytest.CaptureFixture[str]) -> None:
    fill(medium, range(3))
    fill(medium, range(3, 5), tenant=TENANT)
    fill(medium, range(5, 9), age_seconds=3 * 86_400)
    fill(medium, range(2), OTHER)

    def verified(*filters: str) -> int:
        return int(json.loads(run(capsys, *medium.options, "--json", *filters)[1])["frames"])

    assert verified() == 11
    assert verified("--tenant", TENANT.hex()) == 2
    assert verified("--tenant", "default") == 9
    assert verified("--namespace", OTHER.hex) == 2
    assert verified("--older-than", "2d") == 4
    assert verified("--newer-than", "1h", "--namespace", ONE.hex[:8]) == 5
    assert verified("--older-than", "2d", "--newer-than", "7d", "--tenant", "default") == 4


def test_swapped_frames_are_proven_wrong(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    files = FileMedium(tmp_path / "tier")
    fill(files, range(2))
    one, two = files.path(ONE, key_of(0)), files.path(ONE, key_of(1))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    found = json.loads(run(capsys, *files.options, "--json")[1])
    assert found["damage"] == {"key": 2}


def test_a_foreign_and_a_torn_file_are_proven_wrong(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    files = FileMedium(tmp_path / "tier")
    fill(files, range(3))
    fill(files, [7], OTHER)
    files.path(ONE, key_of(0)).write_bytes(files.path(OTHER, key_of(7)).read_bytes())
    with files.path(ONE, key_of(1)).open("r+b") as file:
        file.truncate(2 * PAGE_BYTES)
    found = json.loads(run(capsys, *files.options, "--json")[1])
    # The header at the end of the file is cut off, so nothing says how long the file was.
    assert found["damage"] == {"key": 1, "magic": 1} or found["damage"] == {"namespace": 1, "magic": 1}


def test_a_slot_with_the_frame_of_another_key_is_proven_wrong(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    slabs = SlabMedium(tmp_path / "tier")
    fill(slabs, range(2))
    [theirs] = [frame for frame in slabs.store().frames(headers=True) if frame.key == key_of(1)]
    name, _, start = theirs.place.partition("@")
    with (slabs.root / name).open("rb") as file:
        file.seek(int(start))
        frame = file.read(theirs.stored_bytes)
    assert FRAME.payload_at == 0
    slabs.overwrite(ONE, key_of(0), PAGE_BYTES, frame)
    found = json.loads(run(capsys, *slabs.options, "--json")[1])
    assert found["damage"] == {"key": 1}


def test_a_damaged_document_is_damage(directory: FileMedium | SlabMedium, capsys: pytest.CaptureFixture[str]) -> None:
    fill(directory, [1])
    (directory.root / ONE.hex / "namespace.json").write_bytes(b"{ torn")
    status, out = run(capsys, *directory.options)
    assert status == 1 and "no JSON object" in out


def test_a_block_in_stripes_is_read_in_full(valkey, capsys: pytest.CaptureFixture[str]) -> None:
    from ctl_media import RedisMedium, payload_of, soon

    medium = RedisMedium(valkey.port)
    size = 9 << 20
    tier = medium.tier(size=size)
    tier.store(key_of(1), payload_of(1, size), soon())
    tier.close()
    assert run(capsys, *medium.options, "--rate-limit", "none")[0] == 0
    medium.client.setrange(f"spillway1:{ONE.hex}:{key_of(1).hex()}:0", 5000, b"spoiled")
    status, out = run(capsys, *medium.options, "--remove-damaged")
    assert status == 1 and "payload 1" in out
    assert [name for name in medium.client.scan_iter() if not name.endswith(b"document")] == []
