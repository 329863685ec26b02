from __future__ import annotations

import json

import pytest
from ctl_media import ONE, OTHER, PAYLOAD_BYTES, TENANT, Medium, fill, key_of

from spillway_ctl.command import main


def lines(capsys: pytest.CaptureFixture[str], medium: Medium, *arguments: str) -> list[str]:
    assert main(["tier", "ls", *medium.options, *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_every_frame_is_one_json_line(medium: Medium, capsys: pytest.CaptureFixture[str]) -> None:
    fill(medium, range(3))
    fill(medium, [3], tenant=TENANT)
    medium.overwrite(ONE, key_of(0), 10, b"\xff")
    found = [json.loads(line) for line in lines(capsys, medium, "--json")]
    assert {frozenset(entry) for entry in found} == {
        frozenset(
            {
                "namespace",
                "key",
                "tenant",
                "stored_bytes",
                "payload_bytes",
                "created_unix_seconds",
                "used_unix_seconds",
                "place",
                "damage",
            }
        )
    }
    whole = [entry for entry in found if entry["damage"] is None]
    assert {entry["key"] for entry in whole} == {key_of(seed).hex() for seed in (1, 2, 3)}
    assert {entry["tenant"] for entry in whole} == {"00" * 8, TENANT.hex()}
    assert {entry["payload_bytes"] for entry in whole} == {PAYLOAD_BYTES}
    assert [entry["damage"] for entry in found if entry["damage"]] == ["header"]


def test_for_people_there_is_a_table_and_a_limit(medium: Medium, capsys: pytest.CaptureFixture[str]) -> None:
    fill(medium, range(6))
    header, *rows = lines(capsys, medium, "--limit", "4")
    assert header.split() == ["NAMESPACE", "KEY", "TENANT", "SIZE", "STORED", "USED", "DAMAGE"]
    assert len(rows) == 4 and all(row.startswith(ONE.hex[:8]) and "default" in row for row in rows)


def test_filters_and_a_sentence_when_nothing_is_left(medium: Medium, capsys: pytest.CaptureFixture[str]) -> None:
    fill(medium, range(2))
    fill(medium, range(3), OTHER)
    assert len(lines(capsys, medium, "--json", "--namespace", OTHER.hex[:8])) == 3
    [sentence] = lines(capsys, medium, "--tenant", TENANT.hex())
    assert f"no frames of tenant {TENANT.hex()}" in sentence
    assert lines(capsys, medium, "--tenant", TENANT.hex(), "--json") == []
