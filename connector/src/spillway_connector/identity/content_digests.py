"""Digests of whole files, computed by several threads and cached beside the files.

A cached digest is stored with the file's size, inode and times of change, and is valid while these are unchanged;
copies of a file on other machines have other times and the same digest.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import blake3

from spillway_connector.own_files import is_regular, kind_of, open_own, read_own, rename_own, unlink_own, write_new

logger = logging.getLogger(__name__)

CACHE_NAME = ".spillway-digests"
PIECE_BYTES = 64 << 20  # what one thread takes at a time; part of the digest's definition
_READ_BYTES = 4 << 20
_CACHE_VERSION = 1
_THREADS_MAX = 8
# A file changed this shortly before it was read could change once more within the resolution of its times.
_TIMES_SETTLE_NS = 2_000_000_000
_SLOW_BYTES = 1 << 30  # from here on the log names what the start waits for
_HUB_BLOB = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileState:
    """The attributes that change on one machine whenever a file's bytes do."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        found = path.stat()
        if not is_regular(found):  # opening a FIFO would wait forever
            raise OSError(f"{path} is {kind_of(found)}, and no file of a model or adapter")
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def digests_of(
    paths: Sequence[Path], cache_folders: Sequence[Path] = (), now_ns: Callable[[], int] = time.time_ns
) -> dict[Path, str]:
    """`blake3:<64 hex>` or `sha256:<64 hex>` of each file's bytes.

    A file of a hub's cache is a link to a blob that is named by its SHA-256; this name is used as the digest. Others
    are read once, and their digests are cached in the first of `cache_folders` that is writable, under names relative
    to the first folder. Raises OSError.
    """
    names = {path: _name_in_cache(path, cache_folders) for path in paths}
    found = {path: named for path in paths if (named := _named_by_the_hub(path)) is not None}
    rest = [path for path in paths if path not in found]
    if not rest:
        return found
    with _locked_cache(cache_folders) as cache:
        cached = cache.read()
        states = {path: FileState.of(path) for path in rest}
        wanted = []
        for path in rest:
            entry = cached.get(names[path])
            if entry is not None and entry[0] == states[path]:
                found[path] = entry[1]
            else:
                wanted.append(path)
        if wanted:
            began_ns = now_ns()
            found |= _read(wanted, states)
            settled = {
                names[path]: (states[path], found[path])
                for path in rest
                if max(states[path].mtime_ns, states[path].ctime_ns) < began_ns - _TIMES_SETTLE_NS
            }
            cache.write(settled)
    return found


def file_digest(path: Path, pool: Executor | None = None) -> str:
    """`blake3:<hex>` of the size and of the digests of all pieces of PIECE_BYTES. Raises OSError."""
    state = FileState.of(path)
    starts = range(0, state.size, PIECE_BYTES)
    apply = map if pool is None else pool.map
    pieces: Iterator[bytes] = apply(_piece_digest, [path] * len(starts), starts)
    whole = blake3.blake3(state.size.to_bytes(8, "little"))
    for piece in pieces:
        whole.update(piece)
    return f"blake3:{whole.hexdigest()}"


def _read(paths: Sequence[Path], states: dict[Path, FileState]) -> dict[Path, str]:
    total = sum(states[path].size for path in paths)
    began = time.monotonic()
    if total >= _SLOW_BYTES:
        logger.info("Digesting %.1f GB of weights, once: the start waits for it", total / 1e9)
    with ThreadPoolExecutor(min(_THREADS_MAX, os.cpu_count() or 1), "spillway-digest") as pool:
        found = {path: file_digest(path, pool) for path in paths}
    for path in paths:
        if FileState.of(path) != states[path]:
            raise OSError(f"{path} changed while it was read; start the engine when its files are complete")
    if total >= _SLOW_BYTES:
        logger.info("Digested %.1f GB of weights in %.1f s", total / 1e9, time.monotonic() - began)
    return found


def _piece_digest(path: Path, start: int) -> bytes:
    digest = blake3.blake3()
    buffer = memoryview(bytearray(min(_READ_BYTES, PIECE_BYTES)))
    left = PIECE_BYTES
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[: min(left, len(buffer))])):
            digest.update(buffer[:count])
            left -= count
    return digest.digest()


def _name_in_cache(path: Path, cache_folders: Sequence[Path]) -> str:
    """Two files of one name may lie in two subfolders."""
    if cache_folders and path.is_relative_to(cache_folders[0]):
        return path.relative_to(cache_folders[0]).as_posix()
    return path.name


def is_a_blob_of_the_hub(path: Path) -> bool:
    """Whether a file is a link into the blobs of a hub's cache. Raises OSError."""
    return path.is_symlink() and path.resolve(strict=True).parent.name == "blobs"


def _named_by_the_hub(path: Path) -> str | None:
    if not is_a_blob_of_the_hub(path):
        return None
    blob = path.resolve(strict=True)
    return f"sha256:{blob.name}" if _HUB_BLOB.fullmatch(blob.name) else None


class _Cache:
    """The cache file of one folder; without a folder nothing is cached."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / CACHE_NAME

    def read(self) -> dict[str, tuple[FileState, str]]:
        if self._path is None:
            return {}
        try:
            document = json.loads(read_own(self._path, 1))
            if document["version"] != _CACHE_VERSION:
                return {}
            return {
                name: (FileState(**entry["state"]), str(entry["digest"])) for name, entry in document["files"].items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            logger.warning("%s is damaged; the files are digested again", self._path)
            return {}

    def write(self, files: dict[str, tuple[FileState, str]]) -> None:
        if self._path is None or not files:
            return
        entries = {name: {"state": asdict(state), "digest": digest} for name, (state, digest) in files.items()}
        partial = self._path.with_name(f"{CACHE_NAME}.{os.urandom(8).hex()}")
        document = json.dumps({"version": _CACHE_VERSION, "files": entries}, indent=1)
        try:
            write_new(partial, 1, document.encode())
            rename_own(partial, self._path, 1)
        except OSError as error:
            logger.warning("%s cannot be written (%s); the next start digests the weights again", self._path, error)
            with contextlib.suppress(OSError):
                unlink_own(partial, 1)


@contextlib.contextmanager
def _locked_cache(folders: Sequence[Path]) -> Iterator[_Cache]:
    """The cache, locked: of engines that start together one digests the files, the others wait for its cache."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = open_own(folder / f"{CACHE_NAME}.lock", os.O_CREAT | os.O_RDWR, 1)
        except OSError:
            continue  # read-only, most likely; or a link is in its place
        try:
            with contextlib.suppress(OSError):  # not every network file system has locks; then each reads for itself
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield _Cache(folder)
        finally:
            os.close(descriptor)
        return
    yield _Cache(None)
