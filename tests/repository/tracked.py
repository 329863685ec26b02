"""The tracked files of this repository."""

from __future__ import annotations

import subprocess
from functools import cache

from lanes.rules import ROOT


@cache
def tracked_files() -> tuple[str, ...]:
    """Paths relative to the root, as `git ls-files` lists them, without deleted ones."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(path for path in done.stdout.split("\0") if path and (ROOT / path).is_file())
