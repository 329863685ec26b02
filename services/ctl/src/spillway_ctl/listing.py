"""`spillway tier ls`: the frames one by one, in the order in which they lie there."""

from __future__ import annotations

import itertools
import json
from typing import Any

from spillway_connector.tiers.inspection import StoredFrame
from spillway_ctl.frame_filter import tenant_name
from spillway_ctl.quantities import format_bytes, format_seconds, plural
from spillway_ctl.run import INTERRUPTED, OK, Run

_ROW = "{:<9}  {:<20}  {:<16}  {:>10}  {:>11}  {:>11}  {}"


def listing(run: Run, limit: int | None) -> int:
    """JSON: one line per frame. Raises TierError."""
    run.store.check()
    listed, listed_bytes = 0, 0
    progress = run.progress("listed")
    for frame in itertools.islice(run.frames(headers=True), limit):
        if not listed:
            run.print_line(_ROW.format("NAMESPACE", "KEY", "TENANT", "SIZE", "STORED", "USED", "DAMAGE").rstrip())
        listed += 1
        listed_bytes += frame.stored_bytes
        progress.clear()
        if run.as_json:
            print(json.dumps(as_json(frame)), file=run.out)
        else:
            print(_row(frame, run.now_s), file=run.out)
        if not run.out.isatty():  # else the rows are progress enough
            progress.show(listed, listed_bytes, run.store.share_walked())
    progress.clear()
    if run.interruption.asked:
        run.print_line(f"interrupted after {plural(listed, 'frame')}")
        return INTERRUPTED
    if not listed:
        run.print_line(f"{run.where}: no frames {run.filter}")
    return OK


def as_json(frame: StoredFrame) -> dict[str, Any]:
    """A frame as `ls --json` and `verify --json` show it."""
    return {
        "namespace": frame.namespace.hex(),
        "key": None if frame.key is None else frame.key.hex(),
        "tenant": None if frame.tenant is None else frame.tenant.hex(),
        "stored_bytes": frame.stored_bytes,
        "payload_bytes": frame.payload_bytes,
        "created_unix_seconds": frame.created_s,
        "used_unix_seconds": frame.used_s,
        "place": frame.place,
        "damage": None if frame.damage is None else str(frame.damage.reason),
    }


def _row(frame: StoredFrame, now_s: float) -> str:
    def age(then_s: float | None) -> str:
        return "-" if then_s is None else format_seconds(now_s - then_s)

    return _ROW.format(
        frame.namespace.hex()[:8],
        "-" if frame.key is None else frame.key.hex()[:20],
        "-" if frame.tenant is None else tenant_name(frame.tenant),
        format_bytes(frame.stored_bytes),
        age(frame.created_s),
        age(frame.used_s),
        "" if frame.damage is None else frame.damage.reason,
    ).rstrip()
