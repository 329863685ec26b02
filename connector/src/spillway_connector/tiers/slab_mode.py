"""Slabs or one file per frame: which mode suits a directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from spillway_connector.tiers.nvme_space import LEDGER_NAME
from spillway_connector.tiers.slab_layout import SLAB_FOLDER

Mode = Literal["slab", "files"]

# Slabs need locks and mapped files that all users of the directory see at once: one kernel. These can be mounted by
# several nodes.
SHARED_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs"}
    | {"nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs"}
)


def suitable_mode(root: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Mode:
    """The mode that ``auto`` means for ``root``, which need not exist yet.

    A directory that holds frames of one mode stays with it. Otherwise local file systems get slabs; shared ones, and
    whatever cannot be told, get files.
    """
    if (root / SLAB_FOLDER).is_dir():
        return "slab"
    if (root / LEDGER_NAME).exists():
        return "files"
    try:
        kind = file_system_of(root, mounts.read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError:
        return "files"
    if kind is None or kind.partition(".")[0] in SHARED_FILE_SYSTEMS:
        return "files"
    return "slab"


def file_system_of(root: Path, mountinfo: str) -> str | None:
    """The type of the file system that holds ``root``, after the kernel's list of mounts (proc(5))."""
    path = os.path.realpath(root)
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
