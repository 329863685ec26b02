"""`spillway tier verify`: read every byte of every frame, and report those that do not match their checksums."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from spillway_connector.tiers.inspection import CheckPayload, Damage, Gone, Removal, StoredFrame, StoredNamespace
from spillway_connector.tiers.tier import Clock
from spillway_ctl.listing import as_json
from spillway_ctl.quantities import format_bytes, format_seconds, plural
from spillway_ctl.run import DAMAGED, INTERRUPTED, OK, Run

DAMAGED_LISTED_MAX = 10_000  # in the JSON document, which is written at the end; the counts are of all


BURST_SECONDS = 0.25  # of quiet that may be made up for: one large block does not stop what follows it


class Pace:
    """bytes_per_second: None for no limit. wait: sleeps for the seconds it is given."""

    def __init__(self, bytes_per_second: int | None, clock: Clock, wait: Callable[[float], None]) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._wait = wait
        self._free_at = clock()

    def after(self, size_bytes: int) -> None:
        """Call when this number of bytes has been read; it returns when the next ones may be read."""
        if self._rate is None:
            return
        now = self._clock()
        self._free_at = max(self._free_at, now - BURST_SECONDS) + size_bytes / self._rate
        if self._free_at > now:
            self._wait(self._free_at - now)


def verify(
    run: Run,
    *,
    remove_damaged: bool,
    bytes_per_second: int | None,
    check_payload: CheckPayload | None,
    opens: set[bytes],
) -> int:
    """check_payload opens the seals of the namespaces ``opens``. Raises TierError."""
    run.store.check()
    began = time.monotonic()
    tally = _Tally(run, remove_damaged)
    namespaces = [
        found for found in run.store.namespaces() if found.digest.hex().startswith(run.filter.namespace_prefix)
    ]
    documents = [damage for damage in map(_document_damage, namespaces) if damage is not None]
    for damage in documents:
        run.print_line(f"damaged  {damage.reason:<9}  {damage.sentence}")
    pace = Pace(bytes_per_second, time.monotonic, run.interruption.wait)
    try:
        for frame in run.frames():
            tally.check(frame, check_payload)
            pace.after(frame.stored_bytes)
        tally.complete = not run.interruption.asked
    finally:
        tally.progress.clear()
        seconds = time.monotonic() - began
        _finish(run, tally, documents, _sealed_only(namespaces, opens), seconds)
    if run.interruption.asked:
        return INTERRUPTED
    return DAMAGED if tally.damage or documents else OK


class _Tally:
    """Counts of everything that has been verified so far."""

    def __init__(self, run: Run, remove_damaged: bool) -> None:
        self.complete = False
        self.frames = self.stored_bytes = self.gone = 0
        self.damage: Counter[str] = Counter()
        self.removed = Removal()
        self.listed: list[dict[str, object]] = []
        self.progress = run.progress("verified")
        self._run = run
        self._remove = remove_damaged

    def check(self, frame: StoredFrame, check_payload: CheckPayload | None) -> None:
        try:
            damage = self._run.store.verify(frame, check_payload)
        except Gone:
            self.gone += 1
            return
        self.frames += 1
        self.stored_bytes += frame.stored_bytes
        if damage is not None:
            self._note(replace(frame, damage=damage), damage)
        bad = self.damage.total()
        self.progress.show(
            self.frames,
            self.stored_bytes,
            self._run.store.share_walked(),
            f"{bad:,} damaged" if bad else "",
        )

    def _note(self, frame: StoredFrame, damage: Damage) -> None:
        self.damage[str(damage.reason)] += 1
        removed = Removal()
        if self._remove:
            removed = self._run.store.remove([frame], only_unused=True)
            self.removed += removed
        self.progress.clear()
        note = "; removed" if removed.frames else ""
        self._run.print_line(f"damaged  {damage.reason:<9}  {frame.place}: {damage.sentence}{note}")
        if len(self.listed) < DAMAGED_LISTED_MAX:
            entry = {**as_json(frame), "sentence": damage.sentence, "removed": bool(removed.frames)}
            self.listed.append(entry)


def _finish(run: Run, tally: _Tally, documents: list[Damage], sealed_only: list[str], seconds: float) -> None:
    run.document(
        "verify",
        {
            "seconds": round(seconds, 3),
            "complete": tally.complete,
            "frames": tally.frames,
            "stored_bytes": tally.stored_bytes,
            "damaged_frames": tally.damage.total(),
            "damage": dict(tally.damage),
            "removed_frames": tally.removed.frames,
            "removed_bytes": tally.removed.stored_bytes,
            "gone_frames": tally.gone,
            "verified_as_ciphertext": sealed_only,
            "damaged_documents": [damage.sentence for damage in documents],
            "damaged": tally.listed,
            "damaged_omitted": tally.damage.total() - len(tally.listed),
        },
    )
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(tally.damage.items()))
    found = f"{tally.damage.total():,} damaged ({reasons})" if tally.damage else "none damaged"
    if tally.removed.frames:
        found += f", {tally.removed.frames:,} removed ({format_bytes(tally.removed.stored_bytes)})"
    start = "" if tally.complete else "interrupted: "
    run.print_line(
        f"{start}verified {plural(tally.frames, 'frame')} ({format_bytes(tally.stored_bytes)}) {run.filter} "
        f"in {format_seconds(seconds)}: {found}"
    )
    if tally.gone:
        run.print_line(
            f"{plural(tally.gone, 'frame')} were evicted or replaced before they were read, as engines use the store"
        )
    if sealed_only and tally.frames:
        run.print_line(
            f"encrypted, verified as ciphertext only: {', '.join(name[:8] for name in sealed_only)}; "
            "with --encryption-key-file the seals are opened too"
        )


def _document_damage(namespace: StoredNamespace) -> Damage | None:
    # A namespace without a document is not damage: an engine writes it again.
    return None if namespace.document is None else namespace.damage()


def _sealed_only(namespaces: list[StoredNamespace], opens: set[bytes]) -> list[str]:
    return [found.digest.hex() for found in namespaces if found.codec is not None and found.digest not in opens]
