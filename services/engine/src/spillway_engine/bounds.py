"""Lower bounds of settings, said in one sentence for all of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from spillway_engine.errors import SettingsError


def require_at_least(rows: Iterable[tuple[str, float | None, float]], under: str = "") -> None:
    """rows: (key, what is given, the least that is allowed); None is not set. Raises SettingsError naming the key."""
    for key, given, least in rows:
        if given is not None and given < least:
            raise SettingsError(f"{under}{key}: {given} is too small; set it to {least} or more")
