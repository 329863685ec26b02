"""Chooses the layout that suits a directory: slabs, or one file per frame."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, NamedTuple

from spillway_connector.tiers.disk.root import LEDGER_NAME, MOUNTS, PARTIAL_NAME, SLAB_FOLDER
from spillway_connector.tiers.inspection import is_namespace_name

Mode = Literal["slab", "files"]

# Slabs need locks and changes that all users of the directory see at once: one kernel. These are mounted by one.
LOCAL_FILE_SYSTEMS = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "reiserfs", "tmpfs", "xfs", "zfs"}
)
# These can be mounted by several nodes. A type in neither list gets files, which are right everywhere.
SHARED_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs"}
    | {"nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs"}
)


class Choice(NamedTuple):
    """A layout. ``reason``: half a sentence for the log."""

    mode: Mode
    reason: str


def suitable_mode(root: Path, mounts: Path = MOUNTS) -> Choice:
    """Return the layout that ``auto`` selects for ``root``, which need not exist yet. Raises nothing.

    On shared file systems this is one file per frame; the directory is not accessed, as it may be unreachable and
    block. Elsewhere a directory that holds frames keeps their layout. A new one gets slabs if the file system is known
    to belong to one node, else files.
    """
    mountinfo = _read(mounts)
    shared = _shared_kind(root, mountinfo)
    if shared is not None:
        return Choice("files", f"{shared} may be mounted by other nodes")
    found = layouts_in(root)
    if found:
        mode: Mode = "slab" if "slab" in found else "files"
        return Choice(mode, "the directory holds frames in it")
    kind = file_system_of(root, mountinfo)
    if kind in LOCAL_FILE_SYSTEMS:
        return Choice("slab", f"{kind} is a file system of one node")
    if kind is None:
        return Choice("files", f"its file system is not in {mounts}")
    return Choice("files", f"{kind} is not known to be a file system of one node")


def unused_layouts(root: Path, mode: Mode, mounts: Path = MOUNTS) -> set[Mode]:
    """Return other layouts in ``root``, which engines in ``mode`` neither use nor remove; none if it is shared."""
    return set() if _shared_kind(root, _read(mounts)) is not None else layouts_in(root) - {mode}


def layouts_in(root: Path) -> set[Mode]:
    """Return the layouts in which a directory was used; none if it cannot be read."""
    found: set[Mode] = set()
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if entry.name == SLAB_FOLDER and entry.is_dir():
                    found.add("slab")
                elif entry.name == LEDGER_NAME or (
                    is_namespace_name(entry.name) and os.path.isdir(f"{entry.path}/{PARTIAL_NAME}")
                ):
                    found.add("files")
    except OSError:
        pass
    return found


def is_shared(kind: str) -> bool:
    """Whether several nodes can mount a file system of this type, as mountinfo names it."""
    return kind.partition(".")[0] in SHARED_FILE_SYSTEMS


def file_system_of(root: Path, mountinfo: str) -> str | None:
    """The type of the file system that holds ``root``, after the kernel's list of mounts (proc(5))."""
    return _kind_of(os.path.realpath(root), mountinfo)


def _read(mounts: Path) -> str:
    try:
        return mounts.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""  # not Linux's /proc


def _shared_kind(root: Path, mountinfo: str) -> str | None:
    """Return the type of the shared file system under ``root``, if it is one. An unreachable one is not accessed."""
    for resolve in (os.path.abspath, os.path.realpath):  # the latter accesses the file system
        kind = _kind_of(resolve(root), mountinfo)
        if kind is not None and is_shared(kind):
            return kind
    return None


def _kind_of(path: str, mountinfo: str) -> str | None:
    best, kind = -1, None
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = fields[4].encode("latin-1", "surrogateescape").decode("unicode_escape").rstrip("/")
        # Later lines are mounted over earlier ones.
        if (path == point or path.startswith(point + "/")) and len(point) >= best:
            best, kind = len(point), after.split(" ")[0]
    return kind
