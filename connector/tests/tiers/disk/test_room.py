from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from spillway_connector.tiers.disk import room


def test_the_smaller_of_bound_and_share_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that the tier already holds count as available to it, so that its limit does not shrink while it fills."""
    monkeypatch.setattr(os, "statvfs", lambda root: SimpleNamespace(f_bavail=100, f_frsize=4096))
    assert room.file_system_share(tmp_path, 0) == int(0.8 * 409_600)
    assert room.file_system_share(tmp_path, 10_000) == int(0.8 * 419_600)
    assert room.limit_bytes(tmp_path, 0, None) == int(0.8 * 409_600)
    assert room.limit_bytes(tmp_path, 0, 1000) == 1000
    assert room.limit_bytes(tmp_path, 0, 1 << 30) == int(0.8 * 409_600)
