"""The bytes that a disk tier may take of its file system. Common to both layouts."""

from __future__ import annotations

import os
from pathlib import Path

FREE_FRACTION = 0.8  # of what the file system can give to the tier; the rest is for its other users


def file_system_share(root: Path, used_bytes: int) -> int:
    """Return the bytes that the tier in ``root`` may take of its file system, measured now. Raises OSError.

    used_bytes: the bytes that the tier has there already, which count as available to it.
    """
    volume = os.statvfs(root)
    return int(FREE_FRACTION * (volume.f_bavail * volume.f_frsize + used_bytes))


def limit_bytes(root: Path, used_bytes: int, max_bytes: int | None) -> int:
    """Return the smaller of the bound ``max_bytes``, if configured, and the file system share. Raises OSError."""
    share_bytes = file_system_share(root, used_bytes)
    return share_bytes if max_bytes is None else min(max_bytes, share_bytes)
