from __future__ import annotations

import time
from pathlib import Path

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from spillway_connector.testing.tier_contract import soon
from spillway_connector.tiers.disk.files import ledger as ledger_module
from spillway_connector.tiers.disk.files.ledger import Balance, Ledger

MAKE, REMOVE = 1, 2


def write(path: Path, change: int, note_path: bytes, size: int = 100, resident: int = 1000) -> None:
    """A ledger with an intact note, as anybody can write it: its checksums are no signatures."""
    fields = ledger_module._FIELDS.pack(ledger_module._MAGIC, resident, resident)
    note = ledger_module._NOTE.pack(change, len(note_path), 0, size) + note_path
    path.write_bytes(
        fields + xxhash.xxh3_64_digest(fields) + note + xxhash.xxh3_64_digest(note),
    )


@pytest.mark.parametrize("named", ["../victim", "ns/../../victim", "/{victim}", "./../victim", "ns/aa/../../../victim"])
@pytest.mark.parametrize("change", [MAKE, REMOVE])
def test_a_note_of_a_file_outside_the_store_is_none(tmp_path: Path, named: str, change: int) -> None:
    root, victim = tmp_path / "kv", tmp_path / "victim"
    (root / "ns" / "aa").mkdir(parents=True)
    victim.write_bytes(b"the node's")
    write(root / "space.ledger", change, named.format(victim=victim).encode())
    ledger = Ledger(root / "space.ledger", time.monotonic, depth=1)
    with ledger.locked(soon()) as balance:
        assert balance == Balance(1000, 1000)
    assert victim.read_bytes() == b"the node's"
    ledger.close()


def test_a_note_of_a_file_behind_a_link_removes_nothing_there(tmp_path: Path) -> None:
    root, aside = tmp_path / "kv", tmp_path / "aside"
    root.mkdir()
    aside.mkdir()
    (aside / "victim").write_bytes(b"the node's")
    (root / "ns").symlink_to(aside)
    write(root / "space.ledger", MAKE, b"ns/victim")
    ledger = Ledger(root / "space.ledger", time.monotonic, depth=1)
    with ledger.locked(soon()) as balance:
        assert balance == Balance(900, 1000)
    assert (aside / "victim").read_bytes() == b"the node's"
    ledger.close()


@given(st.binary(max_size=200), st.sampled_from([MAKE, REMOVE]))
@example(b".", MAKE)
@example(b".", REMOVE)
def test_no_note_whatever_its_path_raises_or_leaves_the_store(
    tmp_path_factory: pytest.TempPathFactory, named: bytes, change: int
) -> None:
    folder = tmp_path_factory.mktemp("ledger")
    (folder / "kv").mkdir()
    (folder / "victim").write_bytes(b"the node's")
    write(folder / "kv" / "space.ledger", change, named)
    ledger = Ledger(folder / "kv" / "space.ledger", time.monotonic, depth=1)
    with ledger.locked(soon()):
        pass
    assert (folder / "victim").exists()
    ledger.close()
