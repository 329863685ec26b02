from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from spillway_connector.testing.clock import SteppedClock
from spillway_connector.tiers.disk.idle_memory import CHECK_SECONDS, IdleMemory

GIB = 1 << 30
NODE_GIB = 64


class Node:
    """Files of /proc and /sys as a kernel writes them. Sizes in GiB; unlimited where ``limit`` is None."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        self.available(32)
        self.member("")

    def available(self, free: float, inactive: float = 0) -> None:
        fields = {
            "MemTotal": NODE_GIB,
            "MemFree": free,
            "MemAvailable": 60,
            "Inactive(file)": inactive,
            "Active(file)": 9,
        }
        lines = (f"{name}:    {int(gib * (1 << 20))} kB\n" for name, gib in fields.items())
        (self.root / "proc/meminfo").write_text("".join(lines))

    def member(self, *lines: str) -> None:
        (self.root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines if line))

    def group_v2(self, path: str, limit: float | None, used: float, cached: float) -> None:
        folder = self.root / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text("max\n" if limit is None else f"{int(limit * GIB)}\n")
        (folder / "memory.current").write_text(f"{int(used * GIB)}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {int(cached * GIB)}\nactive_file {GIB}\n")

    def group_v1(self, path: str, limit: float | None, used: float, cached: float) -> None:
        folder = self.root / "sys/fs/cgroup/memory" / path
        folder.mkdir(parents=True, exist_ok=True)
        limit_bytes = 0x7FFFFFFFFFFFF000 if limit is None else int(limit * GIB)
        (folder / "memory.limit_in_bytes").write_text(f"{limit_bytes}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{int(used * GIB)}\n")
        text = f"cache 9\ntotal_inactive_file {int(cached * GIB)}\ntotal_active_file {GIB}\n"
        (folder / "memory.stat").write_text(text)

    @property
    def enough(self) -> bool:
        return IdleMemory(SteppedClock(), self.root).enough


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize(
    ("free", "inactive", "enough"),
    [(32, 0, True), (8, 0, True), (7.9, 0, False), (0, 0, False), (0, 8, True), (4, 3.9, False)],
)
def test_an_eighth_of_the_node_has_to_be_idle(node: Node, free: float, inactive: float, enough: bool) -> None:
    """Pages that were read twice do not count: for kubelet they are in use."""
    node.available(free, inactive)
    assert node.enough is enough


@pytest.mark.parametrize(
    ("limit", "used", "cached", "enough"),
    [
        (None, 60, 0, True),
        (40, 38.9, 0, True),
        (40, 39.1, 0, False),
        (40, 40, 1.2, True),  # pages that were read once can be taken back
        (40, 40, 0.9, False),
        (4, 3.4, 0, True),  # an eighth of a small limit
        (4, 3.6, 0, False),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_needs_some_of_its_limit(
    node: Node, version: int, limit: float | None, used: float, cached: float, enough: bool
) -> None:
    if version == 2:
        node.member("0::/kubepods/pod")
        node.group_v2("kubepods/pod", limit, used, cached)
    else:
        node.member("5:cpu:/kubepods/pod", "4:memory:/kubepods/pod", "0::/")
        node.group_v1("kubepods/pod", limit, used, cached)
    assert node.enough is enough


def test_the_limits_above_count_too(node: Node) -> None:
    node.member("0::/kubepods/pod/container")
    node.group_v2("kubepods/pod/container", None, 1, 0)
    node.group_v2("kubepods/pod", 8, 7.9, 0)
    assert not node.enough
    node.group_v2("kubepods/pod", 8, 5, 0)
    assert node.enough


def test_a_container_that_sees_its_own_group_alone_reads_that(node: Node) -> None:
    node.member("4:memory:/docker/0123")  # a path of the node that is not mounted here
    node.group_v1("", 8, 7.9, 0)
    assert not node.enough


def test_a_node_that_cannot_be_read_has_none(node: Node) -> None:
    (node.root / "proc/meminfo").unlink()
    assert not node.enough
    node.available(32)
    node.group_v2("a", 8, 1, 0)
    node.member("0::/a")
    assert node.enough
    (node.root / "sys/fs/cgroup/a/memory.stat").write_text("anon five\n")
    assert not node.enough


def test_it_is_read_again_after_a_while(node: Node) -> None:
    clock = SteppedClock()
    memory = IdleMemory(clock, node.root)
    assert memory.enough
    node.available(0)
    assert memory.enough
    clock.advance(CHECK_SECONDS)
    assert not memory.enough


def test_threads_that_come_during_the_first_reading_wait_for_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, reading, go_on = IdleMemory(SteppedClock(), node.root), threading.Event(), threading.Event()
    read = memory._read

    def held() -> bool:
        reading.set()
        assert go_on.wait(30.0)
        return read()

    monkeypatch.setattr(memory, "_read", held)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lambda: memory.enough)
        assert reading.wait(30.0)
        second = threads.submit(lambda: memory.enough)
        assert not wait([second], timeout=0.05).done
        go_on.set()
        assert first.result(30.0) and second.result(30.0)


def test_this_node_can_be_read() -> None:
    memory = IdleMemory(SteppedClock())
    assert isinstance(memory._read(), bool)
    assert all(limit > 0 for _, limit in memory._groups(1 << 60))
