from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lanes.rules import ROOT


def test_what_a_killed_bench_left_is_removed_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    from memory_folder import memory_folder, remove_left

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = [f"spillway-bench-{ended.pid}", f"spillway-bench-{ended.pid}-x", f"spillway-bench-{os.getpid()}", "other"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows").write_bytes(b"x")
    with memory_folder(tmp_path) as folder:
        (folder / "rows").write_bytes(b"x")
        remove_left(tmp_path)
        assert sorted(os.listdir(tmp_path)) == sorted([*names[2:], folder.name])
    assert sorted(os.listdir(tmp_path)) == sorted(names[2:])
