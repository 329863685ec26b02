"""The directory of an NVMe tier, in both layouts: damaged, missing, open to all, or prepared while the tier closes."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from spillway_connector.errors import TierUnreachable, UnreachableReason
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, error_of, key_of, load, payload_of, soon
from spillway_connector.tiers.disk import maintenance, root
from spillway_connector.tiers.disk.files import tier as files_tier
from spillway_connector.tiers.disk.files.tier import FileTier
from spillway_connector.tiers.disk.root import access_warning, make_root
from spillway_connector.tiers.disk.slab.tier import SlabTier

DOCUMENT = NAMESPACE.document


@pytest.fixture(params=[FileTier, SlabTier])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (b"", "cut"),
        (DOCUMENT[:20], "cut"),
        (DOCUMENT + b" ", "changed"),
        (DOCUMENT[:9] + b"X" + DOCUMENT[10:], "changed"),
        (b"\xff" * 50, "changed"),
    ],
)
def test_a_damaged_document_is_set_aside_and_the_tier_goes_on(
    tmp_path: Path, kind: Any, damaged: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    tier = kind(NAMESPACE, PAYLOAD_BYTES, tmp_path / "kv", max_bytes=100 << 20)
    tier.store(key_of(1), payload_of(1), soon())
    tier.close()
    document = tmp_path / "kv" / NAMESPACE.hex / "namespace.json"
    document.write_bytes(damaged)
    tier = kind(NAMESPACE, PAYLOAD_BYTES, tmp_path / "kv", max_bytes=100 << 20)
    assert load(tier, key_of(1)) == payload_of(1), "blocks say themselves what they belong to"
    assert document.read_bytes() == DOCUMENT
    assert document.with_name(f"namespace.json.{reason}").read_bytes() == damaged
    assert tier.quarantined == {reason: 1}
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert str(document) in record.getMessage()
    tier.close()


def test_a_path_whose_parent_is_missing_is_refused_by_name_and_not_made(tmp_path: Path, kind: Any) -> None:
    mistyped = tmp_path / "mnt" / "nmve" / "kv"
    tier = kind(NAMESPACE, PAYLOAD_BYTES, mistyped, max_bytes=100 << 20)
    error = error_of(lambda: tier.prepare(soon()))
    assert isinstance(error, TierUnreachable)
    assert error.reason == UnreachableReason.ROOT_MISSING
    assert str(error).startswith(f"path: {mistyped} cannot be made: {tmp_path / 'mnt'} does not exist; ")
    assert "correct the path, or mount" in str(error)
    assert not (tmp_path / "mnt").exists()
    mistyped.parent.mkdir(parents=True)  # as when it is mounted after all
    tier.store(key_of(1), payload_of(1), soon())
    assert load(tier, key_of(1)) == payload_of(1)
    tier.close()


def test_closing_while_the_directory_is_being_prepared_ends_cleanly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = FileTier(NAMESPACE, PAYLOAD_BYTES, tmp_path / "kv")
    raised: list[BaseException] = []

    def close() -> None:
        try:
            tier.close()
        except BaseException as error:
            raised.append(error)

    closer = threading.Thread(target=close)

    class LateStarter(threading.Thread):
        def start(self) -> None:
            closer.start()
            closer.join(0.2)  # it comes as far as it can while this thread is not started
            super().start()

    monkeypatch.setattr(maintenance.threading, "Thread", LateStarter)
    tier.prepare(soon())
    closer.join(30)
    assert raised == []
    assert tier._maintenance._thread is not None
    assert not tier._maintenance.is_running, "joined"


def test_a_tier_that_was_closed_meanwhile_starts_no_maintenance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = FileTier(NAMESPACE, PAYLOAD_BYTES, tmp_path / "kv")
    monkeypatch.setattr(files_tier, "supports_direct", lambda folder, depth: tier.close() is not None)
    tier.prepare(soon())
    assert tier._maintenance._thread is None


def test_a_directory_that_every_user_may_write_to_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "kv"
    place.mkdir()
    place.chmod(0o777)
    for _ in range(2):
        make_root(place)
    assert caplog.text.count("every user may write to it (mode 0777)") == 1
    assert "give the directory to the engines' user or fsGroup alone" in caplog.text
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"1 2 8:1 /var/lib/kubelet/pods/1-2/volumes/kubernetes.io~empty-dir/kv {place} rw - ext4 /dev/a rw\n"
    )
    monkeypatch.setattr(root, "MOUNTS", mounts)
    assert access_warning(place) is None, "only the containers of one pod reach an emptyDir"
