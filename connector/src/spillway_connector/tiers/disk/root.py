"""The directory of a disk tier, in either layout: names at its top, making it, and the namespace documents in it."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from spillway_connector.errors import RefusedReason, TierRefused, TierUnreachable, UnreachableReason
from spillway_connector.namespace import Namespace, explain_difference
from spillway_connector.own_files import (
    NotOwn,
    clear_the_place,
    learn_owner,
    open_to_others,
    read_own,
    rename_own,
    write_new,
)

_log = logging.getLogger(__name__)

DOCUMENT_NAME = "namespace.json"
LEDGER_NAME = "space.ledger"  # file layout: bytes in use
PARTIAL_NAME = "partial"  # file layout: folder of files being written, inside each namespace folder
TENANTS_FOLDER = "tenants"  # file layout: frames by tenant
SLAB_FOLDER = "slab"  # slab layout: everything but the namespace documents
MOUNTS = Path("/proc/self/mountinfo")
_DOCUMENT_DEPTH = 2  # of namespace.json, see own_files.py
_warned: set[Path] = set()
_ATTEMPTS = 3  # another process's sweep may take a document that is being written for abandoned


def entries_in(folder: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    """Return everything in ``folder``; nothing if it is missing. Raises OSError."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def folders_in(folder: str | os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
    """Return the folders in ``folder``, without links. Raises OSError."""
    return (entry for entry in entries_in(folder) if entry.is_dir(follow_symlinks=False))


def make_root(root: Path) -> None:
    """Make the directory, but not its parent: if that is missing, nothing is mounted there or the path is wrong.

    Raises TierUnreachable(ROOT_MISSING), OSError.
    """
    try:
        root.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        raise TierUnreachable(
            UnreachableReason.ROOT_MISSING, missing_parent(root) or f"path: {root}: {error}"
        ) from error
    learn_owner(root)
    warning = access_warning(root)
    if warning is not None and root not in _warned:
        _warned.add(root)
        _log.warning("%s", warning)


def access_warning(root: Path) -> str | None:
    """A sentence on who else may change the store in ``root``; None if only its users may. Raises OSError."""
    others = open_to_others(root)
    if others is None or _is_of_one_pod(root):
        return None
    return (
        f"path: {root}: {others}; whoever may can remove blocks and read those of all "
        "tenants; give the directory to the engines' user or fsGroup alone (mode 0700 or 2770)"
    )


def missing_parent(root: Path) -> str | None:
    """The message for a ``root`` whose parent directory does not exist; None if it does. Raises OSError."""
    missing = [parent for parent in root.absolute().parents if not parent.exists()]
    if not missing:
        return None
    return (
        f"path: {root} cannot be made: {missing[-1]} does not exist; a directory in which it can be made is needed; "
        "correct the path, or mount the file system"
    )


def _is_of_one_pod(root: Path) -> bool:
    """Whether an emptyDir is mounted there: its mode is 0777, and only the containers of its pod reach it."""
    try:
        mounts = [line.split(" ") for line in MOUNTS.read_text(errors="replace").splitlines()]
    except OSError:
        return False
    return any(
        fields[4] == str(root) and "/kubernetes.io~empty-dir/" in fields[3] for fields in mounts if len(fields) > 4
    )


class NamespaceDocument:
    """``namespace.json`` in the folder of one namespace.

    The folder is named after the document's digest, so another text there is damage, not another layout. It is renamed
    and written again; each frame names its namespace itself. The exception is an intact document of another encryption
    key under the same key id: that is refused. quarantined: documents that were renamed, by reason. Safe from several
    threads and processes.
    """

    def __init__(self, folder: Path, namespace: Namespace) -> None:
        self.quarantined: Counter[str] = Counter()
        self._path = folder / DOCUMENT_NAME
        self._namespace = namespace
        self._ours = namespace.document
        self._lock = threading.Lock()

    def check(self) -> None:
        """Check the document if the directory cannot be written to; damage is logged.

        Raises TierRefused(NAMESPACE), OSError.
        """
        try:
            stored = read_own(self._path, _DOCUMENT_DEPTH)
        except FileNotFoundError:
            return  # nothing was ever stored here
        except NotOwn as foreign:
            _log.warning("%s", foreign.strerror)
            return  # each frame names its namespace itself
        if stored != self._ours:
            self._refuse_whole(stored)
            _log.warning(
                "%s is damaged (%s) and cannot be replaced", self._path, explain_difference(self._ours, stored)
            )

    def ensure(self, partial_name: Callable[[], Path], partial_depth: int) -> None:
        """Make sure that the intact document is there. partial_name: a new path for the file that is written first.

        Raises TierRefused(NAMESPACE), OSError.
        """
        with self._lock:
            for _ in range(_ATTEMPTS):
                clear_the_place(self._path, _DOCUMENT_DEPTH)
                try:
                    stored = read_own(self._path, _DOCUMENT_DEPTH)
                except FileNotFoundError:
                    self._write(partial_name(), partial_depth)
                    continue
                if stored == self._ours:
                    return
                self._refuse_whole(stored)
                self._set_aside(stored)

    def _write(self, partial: Path, depth: int) -> None:
        write_new(partial, depth, self._ours)
        try:
            rename_own(partial, self._path, depth, _DOCUMENT_DEPTH)
        except FileNotFoundError:
            pass  # swept by another process: the caller tries again

    def _refuse_whole(self, stored: bytes) -> None:
        if self._namespace.may_own(stored):
            raise TierRefused(
                RefusedReason.NAMESPACE,
                f"{self._path} describes another layout: {explain_difference(self._ours, stored)}; "
                "remove the folder it lies in if its blocks are no longer wanted",
            )

    def _set_aside(self, stored: bytes) -> None:
        reason = "cut" if self._ours.startswith(stored) else "changed"
        aside = self._path.with_name(f"{DOCUMENT_NAME}.{reason}")
        try:
            rename_own(self._path, aside, _DOCUMENT_DEPTH)
        except FileNotFoundError:
            return  # by another process
        self.quarantined[reason] += 1
        difference = explain_difference(self._ours, stored)
        _log.error("%s was damaged (%s): renamed to %s and written again", self._path, difference, aside.name)
