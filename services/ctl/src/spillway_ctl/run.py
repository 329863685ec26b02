"""The arguments of a command besides its own options."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from spillway_connector.tiers.inspection import StoredFrame
from spillway_ctl.frame_filter import FrameFilter
from spillway_ctl.interruption import Interruption
from spillway_ctl.progress import ProgressLine
from spillway_ctl.store import Store

OK, DAMAGED, WRONG, DECLINED, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit statuses, as `spillway tier --help` and docs/operations.md state them."""

JSON_FORMAT = 1  # of the documents of --json; grows when a name or meaning in them changes, not when one is added


@dataclass(frozen=True, slots=True)
class Run:
    """now_s: seconds since 1970 from which ages are counted, the same for all frames of a run."""

    store: Store
    filter: FrameFilter
    now_s: float
    interruption: Interruption
    as_json: bool = False
    out: TextIO = field(default_factory=lambda: sys.stdout)

    def progress(self, doing: str) -> ProgressLine:
        return ProgressLine(doing)

    def frames(self, *, headers: bool = False) -> Iterator[StoredFrame]:
        """The frames that the filter takes, until the command is interrupted. headers: read those of all frames."""
        headers = headers or self.filter.needs_headers
        for frame in self.store.frames(headers=headers, namespace_prefix=self.filter.namespace_prefix):
            if self.interruption.asked:
                return
            if self.filter.takes(frame, self.now_s):
                yield frame

    def print_line(self, text: str = "") -> None:
        """A line for people; nothing with --json."""
        if not self.as_json:
            print(text, file=self.out, flush=True)

    def document(self, command: str, contents: Mapping[str, Any]) -> None:
        """The one JSON document of a command; nothing without --json."""
        if self.as_json:
            store = {"kind": self.store.kind, "layout": self.store.layout, "location": self.store.location}
            whole = {"format": JSON_FORMAT, "command": command, "store": store, **contents}
            print(json.dumps(whole, indent=2), file=self.out, flush=True)

    @property
    def where(self) -> str:
        """The kind and place of the store, for messages."""
        name = {"nvme": "NVMe tier", "redis": "Redis tier", "s3": "S3 tier"}[self.store.kind]
        layout = f" ({self.store.layout})" if self.store.layout else ""
        return f"{name} at {self.store.location}{layout}"
