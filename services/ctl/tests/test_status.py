from __future__ import annotations

import json

import pytest
from ctl_media import FRAME, ONE, OTHER, TENANT, FileMedium, Medium, SlabMedium, fill, key_of, soon

from spillway_ctl.command import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["tier", *arguments])
    message = capsys.readouterr()
    return status, message.out, message.err


def test_namespaces_tenants_and_damage_are_counted(medium: Medium, capsys: pytest.CaptureFixture[str]) -> None:
    fill(medium, range(5))
    fill(medium, range(5, 8), tenant=TENANT)
    fill(medium, range(2), OTHER)
    medium.overwrite(ONE, key_of(0), 33, b"\xff\x00")
    status, out, _ = run(capsys, "status", *medium.options, "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["format"], found["command"], found["frames"], found["damaged_frames"]) == (1, "status", 10, 1)
    assert found["damage"] == {"header": 1} and found["complete"]
    one, other = sorted(found["namespaces"], key=lambda namespace: -namespace["frames"])
    assert (one["namespace"], one["frames"], other["namespace"], other["frames"]) == (ONE.hex, 8, OTHER.hex, 2)
    assert one["document"] == json.loads(ONE.document)
    held = {entry["tenant"]: entry["frames"] for entry in one["tenants"]}
    assert held == {"0000000000000000": 4, TENANT.hex(): 3}
    assert one["unknown_tenant"]["frames"] == 1
    assert one["stored_bytes"] + other["stored_bytes"] == found["stored_bytes"]
    assert one["oldest_unix_seconds"] <= one["newest_unix_seconds"]


def test_for_people_it_says_the_model_and_whose_frames_they_are(
    medium: Medium, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(medium, range(3))
    fill(medium, [3], tenant=TENANT)
    status, out, err = run(capsys, "status", *medium.options)
    assert status == 0 and err == ""
    assert f"namespace {ONE.hex}" in out
    assert "acme/small at 0123456789ab, bfloat16" in out
    assert "cpu:amx, 2 layers, 128 tokens per frame" in out
    assert "default" in out and TENANT.hex() in out
    assert "1 frame " in out and "3 frames" in out


def test_a_namespace_can_be_picked(medium: Medium, capsys: pytest.CaptureFixture[str]) -> None:
    fill(medium, range(3))
    fill(medium, range(2), OTHER)
    found = json.loads(run(capsys, "status", *medium.options, "--json", "--namespace", OTHER.hex[:6])[1])
    assert found["frames"] == 2 and [entry["namespace"] for entry in found["namespaces"]] == [OTHER.hex]


def test_a_store_without_frames_says_so(medium: Medium, capsys: pytest.CaptureFixture[str]) -> None:
    tier = medium.tier()
    tier.prepare(soon())
    tier.close()
    status, out, _ = run(capsys, "status", *medium.options)
    assert status == 0 and "nothing is stored here yet" in out


def test_looking_changes_nothing(directory: FileMedium | SlabMedium, capsys: pytest.CaptureFixture[str]) -> None:
    fill(directory, range(4))

    def state() -> dict[str, tuple[int, bytes]]:
        files = sorted(path for path in directory.root.rglob("*") if path.is_file())
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = state()
    for command in ("status", "ls", "verify"):
        run(capsys, command, *directory.options)
    assert state() == before


def test_a_document_of_another_namespace_is_noticed(
    directory: FileMedium | SlabMedium, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(directory, [1])
    (directory.root / ONE.hex / "namespace.json").write_bytes(OTHER.document)
    found = json.loads(run(capsys, "status", *directory.options, "--json")[1])
    assert "describes another" in found["namespaces"][0]["document_damage"]
    (directory.root / ONE.hex / "namespace.json").unlink()
    found = json.loads(run(capsys, "status", *directory.options, "--json")[1])
    assert "has no document" in found["namespaces"][0]["document_damage"] and found["frames"] == 1
    with (directory.root / ONE.hex / "namespace.json").open("wb") as file:
        file.truncate(1 << 36)
    found = json.loads(run(capsys, "status", *directory.options, "--json")[1])
    assert "has no document" in found["namespaces"][0]["document_damage"] and found["frames"] == 1


def test_an_index_that_cannot_be_read_is_named(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    medium = SlabMedium(tmp_path / "tier")
    fill(medium, [1])
    [index] = medium.root.glob("slab/*/index")
    index.write_bytes(b"no index at all")
    status, out, _ = run(capsys, "status", *medium.options)
    assert status == 0 and "index is missing or damaged" in out


def test_use_is_set_against_the_limit(directory: FileMedium | SlabMedium, capsys: pytest.CaptureFixture[str]) -> None:
    fill(directory, range(4))
    found = json.loads(run(capsys, "status", *directory.options, "--json")[1])
    assert found["used_bytes"] == found["stored_bytes"] == 4 * FRAME.frame_bytes
    assert found["limit_bytes"] > found["used_bytes"] and "file system" in found["limit_means"]
