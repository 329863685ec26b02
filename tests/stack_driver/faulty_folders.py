"""Real faults of a directory. Where mounting is allowed the file system itself refuses; elsewhere it is the nearest
fault that an unprivileged process can cause. Each yields the reasons that the tier may report for it."""

from __future__ import annotations

import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from spillway_connector.tiers.disk.file_lock import FileLock
from spillway_connector.tiers.disk.root import SLAB_FOLDER
from spillway_connector.tiers.disk.slab.layout import INDEX_NAME, LOCK_NAME

from .deadlines import eventually
from .engine_processes import engine_core, vllm_group
from .running_stack import RunningStack

SMALL_BYTES = 48 << 20


@contextmanager
def read_only(folder: Path) -> Iterator[set[str]]:
    """The directory refuses writes; yields the failure reasons that fit."""
    reopened(folder)
    aside = folder.with_name(f"{folder.name}.read-only")
    aside.mkdir()
    with ExitStack() as cleanup:
        cleanup.callback(aside.rmdir)
        if _mount("--bind", str(folder), str(aside)):
            cleanup.callback(_unmount, aside)
            # At an unused path: over the directory itself, an engine may open a file for writing between the two calls,
            # which makes the second one fail.
            assert _mount("-o", "remount,bind,ro", str(aside)), "a bind mount was allowed, making it read-only was not"
            assert _mount("--bind", str(aside), str(folder)), "a bind mount was allowed, a second one was not"
            cleanup.callback(_unmount, folder)
            yield {"read_only"}
        else:
            with replaced_by_file(folder) as reasons:
                yield reasons


def reopened(folder: Path) -> None:
    """Make engines reopen slabs at their next operation: open files stay writable under a new mount. Engines reopen
    when the index was replaced, here by its copy."""
    for index in folder.glob(f"{SLAB_FOLDER}/*/{INDEX_NAME}"):
        lock = FileLock(folder / SLAB_FOLDER / LOCK_NAME, time.monotonic)
        with lock.held(time.monotonic() + 60.0):
            copy = index.with_name("index.copy")
            shutil.copyfile(index, copy)
            copy.rename(index)
        lock.close()


@contextmanager
def replaced_by_file(folder: Path) -> Iterator[set[str]]:
    """An ordinary file stands where the directory was."""
    aside, stand_in = (folder.with_name(f"{folder.name}.{what}") for what in ("aside", "file"))
    stand_in.write_bytes(b"not a folder")
    folder.rename(aside)
    _put(stand_in, folder)
    try:
        yield {"other", "root_missing", "input_output"}
    finally:
        folder.unlink()
        _put(aside, folder)


def _put(what: Path, place: Path) -> None:
    """Rename, although an engine may create a directory of the same name at any moment, which is removed."""

    def moved() -> bool:
        try:
            what.rename(place)
        except OSError:
            shutil.rmtree(place, ignore_errors=True)
            return False
        return True

    eventually(f"{place} is replaced", moved, 60.0)


def remove_in_use(folder: Path) -> None:
    """Remove a directory that engines write into: directories that they create meanwhile are removed as well."""

    def gone() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    eventually(f"{folder} is removed", gone, 60.0)


@contextmanager
def full(running: RunningStack, folder: Path) -> Iterator[set[str]]:
    """No further block fits: a small file system full of other data, or a limit on the size of a writer's files."""
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
        return subprocess.run(["mount", *arguments], capture_output=True, timeout=120, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _unmount(folder: Path) -> None:
    # Lazily: an engine may hold a file of it open for a moment longer.
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=120)
