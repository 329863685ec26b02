"""The mark that makes a directory one place, on whatever nodes it is mounted: the file ``store``.

A path is no identity: it is another disk on another node, and one network directory may be mounted under several. The
first process to use the directory writes the mark, the others read it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from spillway_connector.own_files import first_written

MARK_NAME = "store"
_MARK = re.compile(rb"[0-9a-f]{32}")


class StoreMark:
    """``value``: 32 hex digits, drawn once for the directory; None before :meth:`share`, or if neither reading nor
    writing it succeeded."""

    def __init__(self, root: Path) -> None:
        self._path = root / MARK_NAME
        self.value: bytes | None = None

    def share(self) -> None:
        """Read the directory's mark, or make one. Safe from several processes; raises nothing."""
        try:
            self.value = first_written(self._path, _is_mark, lambda: os.urandom(16).hex().encode())
        except OSError:
            pass  # a read-only directory without a mark, for instance: its blocks are loaded, and not announced


def _is_mark(raw: bytes) -> bool:
    return _MARK.fullmatch(raw) is not None
