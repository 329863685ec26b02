from __future__ import annotations

import json
from pathlib import Path

import pytest
from ctl_media import ONE, PAYLOAD_BYTES, FileMedium, Medium, fill, key_of, payload_of, soon

from spillway_connector.namespace import Namespace
from spillway_connector.tiers.disk.frame_places import FramePlaces
from spillway_connector.tiers.frame import build_header
from spillway_connector.tiers.sealed import SEAL_BYTES, SealedTier, SealKey, sealed_namespace
from spillway_ctl.command import main

KEY = SealKey("2026-a", bytes(range(32)))
SEALED = sealed_namespace(ONE, KEY)


def seal(medium: Medium, seeds: range, namespace: Namespace = SEALED) -> None:
    tier = SealedTier(medium.tier(namespace, size=PAYLOAD_BYTES + SEAL_BYTES), SEALED, PAYLOAD_BYTES, KEY)
    for seed in seeds:
        tier.store(key_of(seed), payload_of(seed), soon())
    tier.close()


def key_file(folder: Path, key: bytes) -> str:
    path = folder / f"key-{key[0]:02x}"
    path.write_text(key.hex())
    return str(path)


def verify(capsys: pytest.CaptureFixture[str], medium: Medium, *arguments: str) -> tuple[int, dict[str, object]]:
    status = main(["tier", "verify", *medium.options, *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_without_a_key_the_ciphertext_is_verified_and_that_is_said(
    medium: Medium, capsys: pytest.CaptureFixture[str]
) -> None:
    seal(medium, range(3))
    fill(medium, range(2))
    status, found = verify(capsys, medium)
    assert status == 0 and found["frames"] == 5 and found["verified_as_ciphertext"] == [SEALED.hex]
    assert main(["tier", "verify", *medium.options]) == 0
    assert "verified as ciphertext only" in capsys.readouterr().out
    assert main(["tier", "status", *medium.options]) == 0
    assert "encrypted with AES-256-GCM, key id 2026-a" in capsys.readouterr().out


def test_with_the_key_the_seals_are_opened(medium: Medium, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seal(medium, range(3))
    fill(medium, range(2))
    status, found = verify(capsys, medium, "--encryption-key-file", key_file(tmp_path, KEY.secret))
    assert status == 0 and found["frames"] == 5 and found["verified_as_ciphertext"] == []


def test_a_forged_frame_is_found_with_the_key_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = FileMedium(tmp_path / "tier")
    seal(files, range(3))
    forged = payload_of(99, PAYLOAD_BYTES + SEAL_BYTES)
    places = FramePlaces.of(forged.nbytes)
    header = build_header(SEALED.digest16, key_of(1), forged, created_ms=0, header_bytes=places.header_bytes)
    frame = bytearray(places.frame_bytes)
    for at, part in ((places.header_at, header), (places.payload_at, bytes(forged))):
        frame[at : at + len(part)] = part
    files.path(SEALED, key_of(1)).write_bytes(frame)
    assert verify(capsys, files)[0] == 0
    status, found = verify(capsys, files, "--encryption-key-file", key_file(tmp_path, KEY.secret), "--remove-damaged")
    assert status == 1 and found["damage"] == {"seal": 1} and found["removed_frames"] == 1


def test_another_key_is_refused_and_never_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = FileMedium(tmp_path / "tier")
    seal(files, range(2))
    wrong = bytes([7]) * 32
    assert main(["tier", "verify", *files.options, "--encryption-key-file", key_file(tmp_path, wrong)]) == 2
    message = capsys.readouterr()
    assert "opens none" in message.err and "2026-a" in message.err and wrong.hex() not in message.err + message.out


def test_a_key_where_nothing_is_encrypted_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = FileMedium(tmp_path / "tier")
    fill(files, range(2))
    assert main(["tier", "verify", *files.options, "--encryption-key-file", key_file(tmp_path, KEY.secret)]) == 2
    assert "nothing here is encrypted" in capsys.readouterr().err
