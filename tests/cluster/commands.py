"""External programs: each with a deadline, and with its own words where it fails."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path


class CommandFailed(AssertionError):
    """The program's words are in the text; `output` and `error` hold them apart."""

    def __init__(self, command: tuple[str, ...], code: int, output: str, error: str) -> None:
        self.code, self.output, self.error = code, output, error
        super().__init__(f"{' '.join(command)}: exit {code}\n{output[-4000:]}{error[-4000:]}")


def run(
    *command: str,
    seconds: float = 60.0,
    given: str | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    check: bool = True,
) -> str:
    """Standard output. Raises CommandFailed for another exit code than 0, subprocess.TimeoutExpired."""
    done = subprocess.run(
        command, capture_output=True, text=True, input=given, env=environment, cwd=folder, timeout=seconds, check=False
    )
    if check and done.returncode != 0:
        raise CommandFailed(command, done.returncode, done.stdout, done.stderr)
    return done.stdout
