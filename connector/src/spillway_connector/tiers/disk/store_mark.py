"""The mark that makes a directory one place, on whatever nodes it is mounted: the file ``store``.

A path is no identity: it is another disk on another node, and one network directory may be mounted under several. The
first process to use the directory writes the mark, the others read it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from spillway_connector.own_files import (
    clear_the_place,
    link_own,
    read_own,
    rename_own,
    unlink_own,
    write_new,
)

MARK_NAME = "store"
_MARK = re.compile(rb"[0-9a-f]{32}")


class StoreMark:
    """``value``: 32 hex digits, drawn once for the directory; None before :meth:`share`, or if neither reading nor
    writing it succeeded."""

    def __init__(self, root: Path) -> None:
        self._path = root / MARK_NAME
        self.value: bytes | None = None

    def share(self) -> None:
        """Take over the directory's mark, or make one. Safe from several processes; raises nothing."""
        try:
            found = self._read()
            if found is None:
                self._write()
                found = self._read()
        except OSError:
            return  # a read-only directory without a mark, for instance: its blocks are loaded, and not announced
        self.value = found

    def _read(self) -> bytes | None:
        try:
            clear_the_place(self._path, 1, links=2)
            raw = read_own(self._path, 1)
        except FileNotFoundError:
            return None
        if _MARK.fullmatch(raw) is None:
            unlink_own(self._path, 1, missing_ok=True)
            return None
        return raw

    def _write(self) -> None:
        partial = self._path.with_name(f"{MARK_NAME}.{os.urandom(8).hex()}")
        write_new(partial, 1, os.urandom(16).hex().encode())
        try:
            link_own(partial, self._path, 1)  # the first of several processes makes the mark
        except FileExistsError:
            pass
        except PermissionError:
            rename_own(partial, self._path, 1)  # no hard links here
        finally:
            unlink_own(partial, 1, missing_ok=True)
