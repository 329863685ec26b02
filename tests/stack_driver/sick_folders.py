"""Real faults of a directory. Where mounting is allowed the file system itself refuses; elsewhere it is the nearest
fault that an ordinary process can make. Each says which reasons the tier may give for it."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .deadlines import eventually
from .engine_processes import engine_core, vllm_group
from .running_stack import RunningStack

SMALL_BYTES = 48 << 20


@contextmanager
def read_only(folder: Path) -> Iterator[set[str]]:
    """The directory refuses writes; yields the failure reasons that fit."""
    with ExitStack() as cleanup:
        if _mount("--bind", str(folder), str(folder)):
            cleanup.callback(_unmount, folder)
            assert _mount("-o", "remount,bind,ro", str(folder)), "a bind mount was allowed, making it read-only was not"
            yield {"read_only"}
        else:
            with replaced_by_file(folder) as reasons:
                yield reasons


@contextmanager
def replaced_by_file(folder: Path) -> Iterator[set[str]]:
    """An ordinary file stands where the directory was."""
    aside = folder.with_name(f"{folder.name}.aside")
    folder.rename(aside)
    folder.write_bytes(b"not a folder")
    try:
        yield {"other", "root_missing", "input_output"}
    finally:
        folder.unlink()
        aside.rename(folder)


def remove_in_use(folder: Path) -> None:
    """Remove a directory that engines write into: what they make meanwhile is removed as well, until all is gone."""

    def gone() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    eventually(f"{folder} is removed", gone, 10.0)


@contextmanager
def full(running: RunningStack, folder: Path) -> Iterator[set[str]]:
    """Not another block fits: a small file system full of other data, or a limit on the size of a writer's files."""
    if _mount("-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "tmpfs", str(folder)):
        try:
            with (folder / "ballast").open("wb") as ballast:
                while True:
                    ballast.write(bytes(1 << 20))
                    ballast.flush()
        except OSError:
            pass  # ENOSPC: full
        try:
            yield {"no_space"}
        finally:
            _unmount(folder)
        return
    cores = [engine_core(vllm_group(running.process(handle.name))) for handle in running.local.engines]
    limits = {core: resource.prlimit(core.pid, resource.RLIMIT_FSIZE) for core in cores}
    for core, (_, hard) in limits.items():
        resource.prlimit(core.pid, resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield {"no_space"}
    finally:
        for core, limit in limits.items():
            resource.prlimit(core.pid, resource.RLIMIT_FSIZE, limit)


def _mount(*arguments: str) -> bool:
    try:
        return subprocess.run(["mount", *arguments], capture_output=True, timeout=30, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _unmount(folder: Path) -> None:
    # Lazily: an engine may hold a file of it open for a moment longer.
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)
