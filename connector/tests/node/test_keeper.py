"""The keeper of a node: what it makes, refuses, takes over and gives back."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from spillway_connector import cut_files
from spillway_connector.device.host_region import HostRegion
from spillway_connector.device.memory_nodes import cores_of_memory_nodes, numbers_in
from spillway_connector.errors import HostMemoryError
from spillway_connector.node import pages
from spillway_connector.node import region as region_module
from spillway_connector.node.keeper import NodeKeeper
from spillway_connector.node.pages import take_pages
from spillway_connector.node.region import REFUSED, WANTED, NodeRegion
from spillway_connector.own_files import write_new
from spillway_connector.plan.node_index import DEAD_ROWS_KEPT_MS, FREE, READY, RESERVED, WRITING
from spillway_connector.plan.node_records import RowWords
from spillway_connector.testing.directory_contract import FOREIGNERS, Victims
from spillway_connector.tiers.disk.slab.writers import WriterLease, new_number

ROWS, ROW_BYTES = 4, 8192
OURS = b"o" * 16
Foreigner = Callable[[Path, Victims], None]
LONG_SECONDS = 60.0  # never waited out if all is well
ROOM = 1 << 40


def keeper_of(path: Path, rows: int = ROWS, sizes_max: int = 1, room: int = ROOM) -> NodeKeeper:
    return NodeKeeper(path, rows * ROW_BYTES, sizes_max, lambda: (room, "test"))


def folder_of(path: Path, row_bytes: int = ROW_BYTES) -> Path:
    return path / f"rows-{row_bytes}"


def asked(path: Path, row_bytes: int = ROW_BYTES) -> None:
    """Leave a request for rows, as an engine does that is killed while it waits for the keeper."""
    with pytest.raises(HostMemoryError, match="was not made within 0 s; start spillway node-tier"):
        NodeRegion(path, ROWS, row_bytes, new_number(), kept_seconds=0.0)
    assert (folder_of(path, row_bytes) / WANTED).exists()


def engine_of(path: Path, row_bytes: int = ROW_BYTES) -> NodeRegion:
    """An engine of a region that is there."""
    return NodeRegion(path, ROWS, row_bytes, new_number(), kept_seconds=0.0)


def test_an_engine_waits_for_the_keeper_which_takes_all_of_the_memory(tmp_path: Path):
    found: list[NodeRegion] = []
    path = tmp_path / "node"
    engine = threading.Thread(
        target=lambda: found.append(NodeRegion(path, ROWS, ROW_BYTES, new_number(), kept_seconds=LONG_SECONDS))
    )
    engine.start()
    keeper = keeper_of(path)
    while engine.is_alive():
        keeper.tick()
        engine.join(0.01)
    (region,) = found
    assert region.memory.taken_bytes >= ROWS * ROW_BYTES
    assert not (folder_of(path) / WANTED).exists()
    (state,) = keeper.states()
    assert (state.row_bytes, state.num_rows, state.rows[FREE], state.namespaces) == (ROW_BYTES, ROWS, ROWS, {})
    assert os.listdir(folder_of(path) / "writers") == [f"{region.lease.number:016x}"]  # the keeper is no engine
    region.close()


def test_an_engine_waits_until_the_folder_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked(tmp_path)
    keeper_of(tmp_path).tick()
    refusals = iter([PermissionError(13, "Permission denied"), None])
    make_folders = region_module.make_folders

    def refused_once(*given: object) -> None:
        if (error := next(refusals, None)) is not None:
            raise error
        make_folders(*given)

    monkeypatch.setattr(region_module, "make_folders", refused_once)
    NodeRegion(tmp_path, ROWS, ROW_BYTES, new_number(), kept_seconds=LONG_SECONDS).close()
    monkeypatch.setattr(region_module, "make_folders", lambda *_: (_ for _ in ()).throw(PermissionError(13, "no")))
    with pytest.raises(HostMemoryError, match="cannot be opened"):
        engine_of(tmp_path)


def test_engines_go_on_without_the_keeper_and_the_next_one_finds_what_they_hold(tmp_path: Path):
    asked(tmp_path)
    keeper = keeper_of(tmp_path)
    keeper.tick()
    region = engine_of(tmp_path)
    place = region.join(lambda: 1)
    del keeper  # killed
    with region.changing() as index:
        known = RowWords(ROWS)
        known.reserved[2] = index.reserve([2], place)[0]
        index.claim([2], known, OURS, [b"k" * 36], place, now_ms=5)
        index.publish([2], known, place)
    again = keeper_of(tmp_path)
    again.tick()
    (state,) = again.states()
    assert state.rows == {FREE: ROWS - 1, WRITING: 0, READY: 1, RESERVED: 0}
    assert state.engines == 1
    assert state.namespaces == {OURS: 1}
    region.close()


def test_what_a_keeper_left_that_was_killed_while_it_took_memory_is_made_anew(tmp_path: Path):
    asked(tmp_path)
    (folder_of(tmp_path) / "rows").write_bytes(b"x" * 100)
    (folder_of(tmp_path) / "rows").chmod(0o600)
    keeper_of(tmp_path).tick()
    region = engine_of(tmp_path)
    assert bytes(region.memory.create_kv_memoryview().cast("B")[:100]) == bytes(100)
    region.close()


def test_what_a_killed_engine_was_writing_or_had_reserved_is_free_again(tmp_path: Path):
    now = [100.0]
    asked(tmp_path)
    keeper = keeper_of(tmp_path)
    keeper.clock = lambda: now[0]
    keeper.tick()
    region = engine_of(tmp_path)
    place = region.join(lambda: int(now[0] * 1000))
    with region.changing() as index:
        known = RowWords(ROWS)
        known.reserved[0] = index.reserve([0, 1], place)[0]
        index.claim([0], known, OURS, [b"k" * 36], place, now_ms=5)
    region.close()  # as the kernel does when the engine is killed
    keeper.tick()
    now[0] += DEAD_ROWS_KEPT_MS / 1000
    keeper.tick()
    assert keeper.released_rows == 2
    assert keeper.states()[0].rows[FREE] == ROWS


def test_each_refusal_is_a_sentence_for_the_engine_that_asks(tmp_path: Path):
    asked(tmp_path)
    keeper_of(tmp_path, room=ROWS * ROW_BYTES).tick()
    with pytest.raises(HostMemoryError, match=r"are available \(test\); lower the tier's bytes"):
        answer_to_one_that_waits(tmp_path)
    asked(tmp_path)
    keeper_of(tmp_path, rows=0).tick()
    with pytest.raises(HostMemoryError, match="hold no chunk of 8192 bytes"):
        answer_to_one_that_waits(tmp_path)
    asked(tmp_path)  # asks again, and does not get the old answer
    keeper = keeper_of(tmp_path)
    keeper.tick()
    assert keeper.refusals == {}
    assert not (folder_of(tmp_path) / REFUSED).exists()


def answer_to_one_that_waits(path: Path, row_bytes: int = ROW_BYTES) -> None:
    """Raise the keeper's answer, as an engine does that asked before there was one."""
    raise HostMemoryError((folder_of(path, row_bytes) / REFUSED).read_text())


def test_rows_of_another_size_replace_those_that_no_engine_uses_and_no_others(tmp_path: Path):
    asked(tmp_path)
    keeper = keeper_of(tmp_path)
    keeper.tick()
    region = engine_of(tmp_path)
    asked(tmp_path, 4096)
    keeper.tick()
    assert "has rows of 8192 bytes in use and room for 1 size" in keeper.refusals[4096]
    region.close()
    asked(tmp_path, 4096)
    keeper.tick()
    assert keeper.refusals == {}
    assert [state.row_bytes for state in keeper.states()] == [4096]
    assert not (folder_of(tmp_path) / "rows").exists()
    two = keeper_of(tmp_path, sizes_max=2)
    asked(tmp_path)
    two.tick()
    assert [state.row_bytes for state in two.states()] == [4096, 8192]


def test_another_number_of_rows_is_made_when_no_engine_uses_the_old_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    asked(tmp_path)
    keeper_of(tmp_path).tick()
    region = engine_of(tmp_path)
    region.join(lambda: 1)
    larger = keeper_of(tmp_path, 2 * ROWS)
    larger.tick()
    second = NodeRegion(tmp_path, 2 * ROWS, ROW_BYTES, new_number(), kept_seconds=0.0)
    assert second.num_rows == ROWS  # a rolling update goes on with the old rows
    assert "has 4 rows, and this engine is to have 8" in caplog.text
    region.close()
    with second.changing() as index:
        index.sweep(lambda _: False, None, 1)
        index.sweep(lambda _: False, None, 1 + DEAD_ROWS_KEPT_MS)
    second.close()
    larger.tick()
    asked(tmp_path)
    larger.tick()
    assert [state.num_rows for state in larger.states()] == [2 * ROWS]


def test_a_region_whose_files_were_replaced_is_found_again(tmp_path: Path):
    asked(tmp_path)
    keeper = keeper_of(tmp_path)
    keeper.tick()
    for name in ("index", "rows"):
        (folder_of(tmp_path) / name).unlink()
    keeper.tick()
    assert keeper.states() == []
    asked(tmp_path)
    keeper.tick()
    assert len(keeper.states()) == 1


def test_memory_is_given_back_unless_an_engine_uses_it(tmp_path: Path):
    asked(tmp_path)
    keeper_of(tmp_path).tick()
    region = engine_of(tmp_path)
    region.join(lambda: 1)
    assert NodeKeeper(tmp_path, 0, 0, lambda: (ROOM, "test")).remove() == [ROW_BYTES]
    region.close()
    assert NodeKeeper(tmp_path, 0, 0, lambda: (ROOM, "test")).remove() == []
    assert not (folder_of(tmp_path) / "rows").exists()


def test_a_folder_that_cannot_be_used_is_an_error_of_the_tick(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        keeper_of(tmp_path / "file").tick()


@pytest.mark.parametrize("name", [WANTED, REFUSED, "index", "rows", "lock", "writers"])
@pytest.mark.parametrize("foreigner", FOREIGNERS, ids=lambda kind: kind.__name__)
def test_what_is_wrong_with_one_folder_stops_no_other(tmp_path: Path, name: str, foreigner: Foreigner):
    """Engines get rows of one size, and no call waits, whatever lies in the place of a file of another size."""
    path, victims = tmp_path / "node", Victims(tmp_path / "victims")
    asked(path, 4096)
    keeper = keeper_of(path, room=0, sizes_max=2)
    place = folder_of(path, 4096) / name
    if place.is_dir():
        place.rename(tmp_path / "aside")
    place.unlink(missing_ok=True)
    foreigner(place, victims)
    before = victims.seen()
    asked(path)
    keeper.tick()
    assert "are available (test)" in keeper.refusals[ROW_BYTES]
    keeper.room = lambda: (ROOM, "test")
    for size in (ROW_BYTES, 4096):
        with suppress(OSError):
            write_new(folder_of(path, size) / WANTED, 2, b"")
    keeper.tick()
    assert ROW_BYTES in [state.row_bytes for state in keeper.states()]
    engine_of(path).close()
    assert victims.seen() == before
    assert not (victims.folder / "to-be-made").exists()


# -- pages


def test_pieces_of_all_memory_nodes_make_the_whole_region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pages, "_PIECE_BYTES", 4096)
    cores = frozenset(os.sched_getaffinity(0))
    region = HostRegion(tmp_path / "rows", 9, 4096, keeps_name=True)
    populated: list[tuple[int, int]] = []
    populate = region.populate
    monkeypatch.setattr(region, "populate", lambda *piece: populated.append(piece) or populate(*piece))
    take_pages(region, [cores, cores])
    assert sorted(populated) == [(start, 4096) for start in range(0, 9 * 4096, 4096)]
    assert region.taken_bytes >= 9 * 4096
    assert frozenset(os.sched_getaffinity(0)) == cores  # of this thread
    region.cleanup()


def test_a_kernel_that_cannot_be_asked_for_pages_allocates_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    region = HostRegion(tmp_path / "rows", 9, 4096, keeps_name=True)
    monkeypatch.setattr(region, "populate", lambda *_: False)
    take_pages(region)
    assert region.taken_bytes >= 9 * 4096
    region.cleanup()


def test_too_little_memory_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    region = HostRegion(tmp_path / "rows", 9, 4096, keeps_name=True)

    def refuse(*_: int) -> bool:
        raise OSError(14, "Bad address")

    monkeypatch.setattr(region, "populate", refuse)
    with pytest.raises(HostMemoryError, match=r"of its 36864 bytes of memory \(Bad address\); lower the node tier's"):
        take_pages(region)
    region.cleanup()


def test_cores_of_memory_nodes(tmp_path: Path):
    for node, cores in (("node0", "0-2,7"), ("node1", "3-6"), ("node2", "")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cores + "\n")
    assert cores_of_memory_nodes(tmp_path, {0, 1, 7, 4}) == [frozenset({0, 1, 7}), frozenset({4})]
    assert cores_of_memory_nodes(tmp_path / "none") == []
    assert numbers_in("0-2,7\n") == {0, 1, 2, 7}


@pytest.mark.parametrize("name", ["index", "rows"])
@pytest.mark.parametrize("left", [0, 4096])
def test_a_region_that_was_cut_while_no_engine_used_it_is_made_again_at_once(tmp_path: Path, name: str, left: int):
    asked(tmp_path)
    keeper = keeper_of(tmp_path)
    keeper.tick()
    os.truncate(folder_of(tmp_path) / name, left)
    keeper.tick()
    asked(tmp_path)
    keeper.tick()
    region = engine_of(tmp_path)
    assert region.is_whole
    region.join(lambda: 1)
    region.close()
    os.truncate(folder_of(tmp_path) / name, left)
    alone = NodeRegion(tmp_path, ROWS, ROW_BYTES, new_number())  # without a keeper
    assert alone.is_whole
    alone.close()


@pytest.mark.parametrize("failing", ["lease", "rows"])
def test_nothing_is_watched_of_a_region_that_could_not_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
):
    """The region's mappings end, and what lies at their addresses later is no file of the node's."""
    NodeRegion(tmp_path, ROWS, ROW_BYTES, new_number()).close()
    watched = cut_files._handler.watched

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((WriterLease, "acquire") if failing == "lease" else (region_module, "HostRegion")), full)
    with pytest.raises(HostMemoryError, match="cannot be opened"):
        NodeRegion(tmp_path, ROWS, ROW_BYTES, new_number())
    assert cut_files._handler.watched == watched
