"""build/cluster/report.json: what each case did, a row the moment it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

TROUBLE_CHARS_MAX = 2000


@dataclass
class Row:
    case: str
    requests: int = 0
    failed: int = 0
    seconds: float = 0.0
    ok: bool = False
    note: str = ""


class Report:
    """Rows of an earlier run stay until a case of the same name replaces them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def case(self, name: str) -> Iterator[Row]:
        """The row is `ok` when the block ends without an exception; the rest is the block's to set."""
        row = Row(name)
        begun = time.monotonic()
        try:
            yield row
        except BaseException as error:
            self.write(row, time.monotonic() - begun, f"{type(error).__name__}: {error}")
            raise
        self.write(row, time.monotonic() - begun)

    def write(self, row: Row, seconds: float, trouble: str = "") -> None:
        """trouble: why the case did not end well; empty where it did."""
        row.seconds, row.ok = round(seconds, 1), not trouble
        row.note = "; ".join(part for part in (row.note, trouble[:TROUBLE_CHARS_MAX]) if part)
        rows = json.loads(self._path.read_text()) if self._path.exists() else []
        rows = [earlier for earlier in rows if earlier["case"] != row.case] + [asdict(row)]
        self._path.write_text(json.dumps(rows, indent=1) + "\n")
