from pathlib import Path

import pytest

from spillway_engine.machine import cgroup_memory_free, cpu_flags, memory_nodes, probe_machine


def limit(folder: Path, maximum: str, current: int, stat: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(maximum + "\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(stat)


def test_flags_of_either_architecture() -> None:
    assert "avx512_bf16" in cpu_flags("processor : 0\nflags\t\t: fpu avx2 avx512_bf16\n")
    assert "bf16" in cpu_flags("processor : 0\nFeatures\t: fp asimd bf16\n")
    assert cpu_flags("") == frozenset()


@pytest.mark.parametrize(
    ("status", "nodes"),
    [
        ("Name:\tx\nMems_allowed_list:\t0\n", 1),
        ("Mems_allowed_list:\t0,2-3\nx", 3),
        ("Mems_allowed_list:\t\n", 1),
        ("", 1),
    ],
)
def test_nodes_of_memory(status: str, nodes: int) -> None:
    assert memory_nodes(status) == nodes


def test_the_tightest_cgroup_decides(tmp_path: Path) -> None:
    limit(tmp_path / "pod", str(8 << 30), 5 << 30)
    limit(tmp_path / "pod" / "engine", str(7 << 30), 1 << 30)

    assert cgroup_memory_free(tmp_path, "0::/pod/engine\n") == 3 << 30


def test_page_cache_counts_as_free(tmp_path: Path) -> None:
    limit(tmp_path, str(4 << 30), 3 << 30, f"anon 5\nactive_file {1 << 29}\ninactive_file {1 << 29}\n")

    assert cgroup_memory_free(tmp_path, "0::/\n") == 2 << 30


def test_no_limit_is_no_answer(tmp_path: Path) -> None:
    limit(tmp_path / "pod", "max", 1)

    assert cgroup_memory_free(tmp_path, "0::/pod\n") is None


def test_this_machine_has_memory_and_cores() -> None:
    machine = probe_machine("cpu")

    assert machine.platform == "cpu"
    assert machine.cores
    assert machine.memory_nodes >= 1
    assert machine.memory_available_bytes > 0
    assert 0 <= machine.shared_memory_free_bytes <= machine.shared_memory_total_bytes
