import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spillway_engine.shared_memory import files_of_group, group_members, paths_in_use, sweep_stale_regions

HOLD = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
held = mmap.mmap(file, 4096)
if sys.argv[2] == "mapped":
    os.close(file)
print("holding", flush=True)
sys.stdin.read()
"""


def region(folder: Path, name: str) -> Path:
    path = folder / f"vllm_offload_{name}.mmap"
    path.write_bytes(b"\0" * 8192)
    return path


@pytest.mark.parametrize("how", ["mapped", "open"])
def test_the_sweep_spares_what_a_living_process_holds(tmp_path: Path, how: str) -> None:
    held, stale = region(tmp_path, "held"), region(tmp_path, "stale")
    other = tmp_path / "psm_1234"
    other.write_bytes(b"x")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(held), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"holding\n"

        sweep = sweep_stale_regions(tmp_path)
        group_files = files_of_group(holder.pid, tmp_path)
        members = group_members(holder.pid)
        holder.communicate()

    assert sweep.removed == (stale,)
    assert sweep.kept == (held,)
    assert sweep.freed_bytes == 8192
    assert held.exists() and other.exists() and not stale.exists()
    assert group_files == {held}
    assert members == [holder.pid]


def test_the_sweep_takes_every_file_of_a_region(tmp_path: Path) -> None:
    """vLLM 0.33 splits a large one."""
    first = region(tmp_path, "left")
    segments = [first.with_name(f"{first.name}.{number}") for number in (1, 31)]
    for segment in segments:
        segment.write_bytes(b"x")

    assert set(sweep_stale_regions(tmp_path).removed) == {first, *segments}
    assert list(tmp_path.iterdir()) == []


def test_the_sweep_takes_it_once_the_holder_is_dead(tmp_path: Path) -> None:
    left = region(tmp_path, "left")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(left), "mapped"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"holding\n"
        holder.kill()

    assert sweep_stale_regions(tmp_path).removed == (left,)


def test_a_semaphore_of_multiprocessing_is_its_groups_file() -> None:
    """glibc maps it under a passing name before it gets its own, so no line of /proc/PID/maps names it."""
    program = (
        "import multiprocessing, sys\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "print(lock._semlock.name, flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as holder:
        assert holder.stdout is not None
        semaphore = Path(f"/dev/shm/sem.{holder.stdout.readline().decode().strip().lstrip('/')}")
        files, used = files_of_group(holder.pid), paths_in_use([semaphore])
        holder.communicate()

    assert files == used == {semaphore}
    assert not semaphore.exists()


def test_our_own_mapping_counts_as_use(tmp_path: Path) -> None:
    path = region(tmp_path, "ours")
    file = os.open(path, os.O_RDWR)
    with mmap.mmap(file, 4096):
        os.close(file)
        assert paths_in_use([path]) == {path}
    assert paths_in_use([path]) == set()


def test_an_empty_folder_needs_no_look_at_processes(tmp_path: Path) -> None:
    assert sweep_stale_regions(tmp_path, proc=tmp_path / "no-proc").removed == ()
