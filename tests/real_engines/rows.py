"""One row for each thing that was shown: what was promised, what was seen, and whether that is the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    vllm: str
    part: str
    case: str
    seen: str
    held: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Rows:
    """The rows of one vLLM, each printed as it comes: a run takes minutes."""

    vllm: str
    rows: list[Row] = field(default_factory=list)

    def add(self, part: str, case: str, seen: object, held: bool) -> None:
        row = Row(self.vllm, part, case, str(seen), held)
        self.rows.append(row)
        print(render([row]), flush=True)


def render(rows: list[Row]) -> str:
    return "\n".join(
        f"{row.vllm:<5} {'ok    ' if row.held else 'BROKEN'} {row.part:<9} {row.case:<56} {row.seen}" for row in rows
    )
