"""The text of a file that a command names; - is standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from spillway_ctl.errors import CommandError


def read_named(name: str | Path, option: str = "") -> str:
    """The whole text.

    Args:
        name: a path, or `-`.
        option: the option that named it, for the message.

    Raises:
        CommandError: it cannot be read, or is not UTF-8.
    """
    try:
        return sys.stdin.read() if str(name) == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        shown = f"{option} {name}".strip()
        raise CommandError(f"{shown}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
