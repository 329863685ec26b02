"""Source archives of vLLM and vllm-ascend on the package index, which hold the tests that wheels leave out.

An archive is downloaded once, into a folder outside this clone, and only with the expected hash. Only what tests want
of it is unpacked; nothing of it is built or installed.
"""

from __future__ import annotations

import hashlib
import html.parser
import os
import shutil
import ssl
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path
from typing import NamedTuple

CACHE_ENV = "SPILLWAY_UPSTREAM"
_TIMEOUT_SECONDS = 120.0
_PIECE_BYTES = 1 << 20
# Of vLLM: packages that its tests of offloading consist of, or import.
_WANTED = ("tests/__init__.py", "tests/v1/__init__.py", "tests/v1/kv_offload/", "tests/v1/kv_connector/")


class Archive(NamedTuple):
    """One release in source form. wanted: what its paths begin with, of those that are unpacked."""

    version: str
    sha256: str
    project: str = "vllm"
    wanted: tuple[str, ...] = _WANTED

    @property
    def stem(self) -> str:
        return f"{self.project.replace('-', '_')}-{self.version}"

    @property
    def file_name(self) -> str:
        return f"{self.stem}.tar.gz"


ARCHIVES = {
    archive.version: archive
    for archive in (
        Archive("0.23.0", "760269db3d9611e12e524681df1bca0977d5d2f5fcb4481cc34d33efc4ae7ff5"),
        Archive("0.32.0", "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"),
        Archive("0.33.0", "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"),
    )
}


class ArchiveError(Exception):
    """The index does not offer the archive, or offers other bytes."""


def unpacked(archive: Archive) -> Path:
    """The folder with what is wanted of the archive, downloaded and unpacked if it is missing. Raises ArchiveError."""
    cache = Path(os.environ.get(CACHE_ENV) or Path.home() / ".cache" / "spillway-upstream")
    folder = cache / f"{archive.stem}-{archive.sha256[:16]}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = cache / f"{folder.name}.{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            downloaded = partial / archive.file_name
            _download(archive, downloaded)
            _unpack(downloaded, partial, archive)
            downloaded.unlink()
            try:
                partial.rename(folder)
            except OSError:
                if not folder.exists():  # else another process was faster
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _download(archive: Archive, target: Path) -> None:
    settings = _installer_settings()
    index = settings.get("index-url") or _default_index()
    context = ssl.create_default_context(cafile=settings.get("cert"))
    page_url = f"{index.rstrip('/')}/{archive.project}/"
    with urllib.request.urlopen(page_url, timeout=_TIMEOUT_SECONDS, context=context) as page:
        links = _Links(page_url)
        links.feed(page.read().decode())
    url = links.by_name.get(archive.file_name)
    if url is None:
        raise ArchiveError(f"the package index does not list {archive.file_name}")
    digest = hashlib.sha256()
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS, context=context) as reply, target.open("wb") as file:
        while piece := reply.read(_PIECE_BYTES):
            digest.update(piece)
            file.write(piece)
    if digest.hexdigest() != archive.sha256:
        raise ArchiveError(f"{archive.file_name} has SHA-256 {digest.hexdigest()}, not {archive.sha256}")


def _unpack(downloaded: Path, folder: Path, archive: Archive) -> None:
    root = f"{archive.stem}/"
    with tarfile.open(downloaded) as tar:
        for member in tar:
            name = member.name.removeprefix(root)
            if member.isfile() and name.startswith(archive.wanted):
                member.name = name
                tar.extract(member, folder, filter="data")


class _Links(html.parser.HTMLParser):
    """File name -> address, of one project's page on an index."""

    def __init__(self, page_url: str) -> None:
        super().__init__()
        self._page_url = page_url
        self.by_name: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href")
        if tag == "a" and target:
            url = urllib.parse.urljoin(self._page_url, target)
            self.by_name[urllib.parse.unquote(urllib.parse.urlsplit(url).path.rsplit("/", 1)[-1])] = url


def _bootstrap_python() -> str:
    """One with pip: the environments have none."""
    bootstrap = Path(__file__).resolve().parents[2] / ".venv/bootstrap/bin/python"
    return str(bootstrap) if bootstrap.exists() else sys.executable


def _installer_settings() -> dict[str, str]:
    """pip's settings on this machine, by their last name: index, certificates."""
    listed = subprocess.run(
        [_bootstrap_python(), "-m", "pip", "config", "list"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    settings: dict[str, str] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        settings[name.rsplit(".", 1)[-1]] = value.strip("'")
    return settings


def _default_index() -> str:
    """pip's own default."""
    command = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    done = subprocess.run([_bootstrap_python(), "-c", command], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()
