from __future__ import annotations

import os
from pathlib import Path

import pytest

from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, key_of, payload_of, soon
from spillway_connector.tiers.disk.files.inspect import FileInspector
from spillway_connector.tiers.disk.files.tier import FileTier
from spillway_connector.tiers.disk.inspection import namespaces_below
from spillway_connector.tiers.inspection import Gone, StoredNamespace


def fill(root: Path, count: int) -> None:
    tier = FileTier(NAMESPACE, PAYLOAD_BYTES, root, max_bytes=8 << 20)
    for seed in range(count):
        tier.store(key_of(seed), payload_of(seed), soon())
    tier.close()


def test_a_walk_finds_what_was_stored_and_the_ledger_counts_it(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    inspector = FileInspector(tmp_path)
    found = list(inspector.frames(headers=True))
    assert {frame.key for frame in found} == {key_of(seed) for seed in range(5)}
    assert all(inspector.verify(frame) is None for frame in found)
    assert inspector.stored_bytes() == sum(frame.stored_bytes for frame in found)
    assert [known.document for known in namespaces_below(tmp_path)] == [NAMESPACE.document]


def test_files_being_written_are_no_frames(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (tmp_path / NAMESPACE.hex / "partial" / "unfinished.kv").write_bytes(bytes(4096))
    assert len(list(FileInspector(tmp_path).frames(headers=False))) == 1


def test_a_removed_frame_is_gone_and_not_damaged(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    inspector = FileInspector(tmp_path)
    first, second = inspector.frames(headers=False)
    os.unlink(tmp_path / first.place)
    with pytest.raises(Gone):
        inspector.verify(first)
    assert inspector.remove([first, second], only_unused=True).frames == 1
    assert inspector.stored_bytes() == first.stored_bytes  # of the one that was removed by hand
    inspector.close()


def test_empty_folders_go_with_the_last_frame(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    inspector = FileInspector(tmp_path)
    assert inspector.remove(list(inspector.frames(headers=False)), only_unused=True).frames == 3
    assert not list((tmp_path / NAMESPACE.hex).glob("??/*"))  # the outer ones, 256 at most, stay
    inspector.close()


def test_a_damaged_ledger_counts_nothing(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (tmp_path / "space.ledger").write_bytes(b"SPILLSPC" + bytes(24))
    assert FileInspector(tmp_path).stored_bytes() is None
    (tmp_path / "space.ledger").write_bytes(b"short")
    assert FileInspector(tmp_path).stored_bytes() is None


def test_a_document_is_the_one_its_folder_is_named_after() -> None:
    assert StoredNamespace(NAMESPACE.digest16, NAMESPACE.document).damage() is None
    for wrong, word in ((None, "no document"), (b"{", "no JSON"), (b"[1]", "no JSON"), (b'{"a":1}', "another")):
        damage = StoredNamespace(NAMESPACE.digest16, wrong).damage()
        assert damage is not None and damage.reason == "document" and word in damage.sentence


def test_what_is_no_frame_but_has_the_name_of_one_is_named_and_can_be_removed(tmp_path: Path) -> None:
    root, victim = tmp_path / "kv", tmp_path / "victim"
    fill(root, 3)
    victim.write_bytes(b"the node's")
    linked, waiting, _ = sorted(root.rglob("*.kv"))
    linked.unlink()
    linked.symlink_to(victim)
    waiting.unlink()
    os.mkfifo(waiting)
    inspector = FileInspector(root)
    for headers in (False, True):
        found = {frame.place: frame for frame in inspector.frames(headers=headers)}
        foreign = [found[str(path.relative_to(root))] for path in (linked, waiting)]
        assert [frame.damage and frame.damage.reason for frame in foreign] == ["foreign", "foreign"]
        assert [inspector.verify(frame) for frame in foreign] == [frame.damage for frame in foreign]
    assert inspector.remove(foreign, only_unused=True).frames == 2
    assert not linked.is_symlink() and not waiting.exists()
    assert victim.read_bytes() == b"the node's"
    inspector.close()
