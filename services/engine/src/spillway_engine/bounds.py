"""Lower bounds of settings, said in one sentence for all of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from spillway_engine.door import Door
from spillway_engine.errors import SettingsError


def require_at_least(rows: Iterable[tuple[str, float | None, float]], door: Door) -> None:
    """rows: (path, what is given, the least that is allowed); None is not set. Raises SettingsError with its name."""
    for path, given, least in rows:
        if given is not None and given < least:
            raise SettingsError(f"{door.given(path, given)} is too small; set it to {least} or more")
