"""How much of a file system a disk tier may take, and when it counts as short of room. Common to both layouts."""

from __future__ import annotations

import os
from pathlib import Path

FREE_FRACTION = 0.8  # of what the file system can give to the tier; the rest is for its other users
PRESSURE_SECONDS = 5.0  # how long an eviction or refusal for want of room counts as pressure


def file_system_share(root: Path, used_bytes: int) -> int:
    """Bytes that the tier in ``root`` may take of its file system, measured now.

    used_bytes: what the tier has there already, which counts as available to it. Raises OSError.
    """
    volume = os.statvfs(root)
    return int(FREE_FRACTION * (volume.f_bavail * volume.f_frsize + used_bytes))


def limit_bytes(root: Path, used_bytes: int, max_bytes: int | None) -> int:
    """The smaller of the configured bound ``max_bytes``, if there is one, and the file system share. OSError."""
    share_bytes = file_system_share(root, used_bytes)
    return share_bytes if max_bytes is None else min(max_bytes, share_bytes)
