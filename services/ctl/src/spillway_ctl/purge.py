"""`spillway tier purge`: remove frames while engines use the tier; what is asked for again is computed again."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable

from spillway_connector.tiers.inspection import Removal, StoredFrame
from spillway_ctl.errors import CommandError
from spillway_ctl.quantities import format_bytes, format_seconds, plural
from spillway_ctl.run import DECLINED, INTERRUPTED, OK, Run

BATCH_FRAMES = 128  # removed in one call: engines wait for a part of it at most


def purge(run: Run, *, dry_run: bool, yes: bool, ask: Callable[[str], bool] | None) -> int:
    """ask: asks for confirmation; None without a terminal. Raises TierError, CommandError."""
    if not dry_run and not yes and ask is None:
        raise CommandError("there is no terminal to ask on; add --yes to remove, or --dry-run to see what would go")
    run.store.check()
    began = time.monotonic()
    if dry_run or not yes:
        matched = _count(run)
        if dry_run or run.interruption.asked or not matched.frames:
            complete = not run.interruption.asked
            _finish(run, matched, Removal(), dry_run=dry_run, complete=complete, seconds=time.monotonic() - began)
            return OK if complete else INTERRUPTED
        assert ask is not None
        if not ask(f"Remove {_amount(matched)} {run.filter} from the {run.where}?"):
            run.print_line("nothing was removed")
            return DECLINED
    tally = _Removing(run)
    try:
        tally.all()
    finally:
        seconds = time.monotonic() - began
        _finish(run, tally.matched, tally.removed, dry_run=False, complete=tally.complete, seconds=seconds)
    return OK if tally.complete else INTERRUPTED


def asker() -> Callable[[str], bool] | None:
    """The function that asks on the terminal; None if standard input is no terminal."""
    if not sys.stdin.isatty():
        return None

    def ask(question: str) -> bool:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # else Ctrl-C would not end the waiting
        try:
            sys.stderr.write(f"{question} [y/N] ")
            sys.stderr.flush()
            return sys.stdin.readline().strip().lower() in ("y", "yes")
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            return False
        finally:
            signal.signal(signal.SIGINT, before)

    return ask


def _count(run: Run) -> Removal:
    matched, progress = Removal(), run.progress("counted")
    for frame in run.frames():
        matched += Removal(1, frame.stored_bytes)
        progress.show(matched.frames, matched.stored_bytes, run.store.share_walked())
    progress.clear()
    return matched


class _Removing:
    """A walk that removes what it meets, a batch at a time."""

    def __init__(self, run: Run) -> None:
        self.matched = self.removed = Removal()
        self._run = run
        self.complete = False
        self._batch: list[StoredFrame] = []

    def all(self) -> None:
        progress = self._run.progress("removed")
        namespaces: set[bytes] = set()
        try:
            for frame in self._run.frames():
                self.matched += Removal(1, frame.stored_bytes)
                namespaces.add(frame.namespace)
                self._batch.append(frame)
                if len(self._batch) == BATCH_FRAMES:
                    self._remove()
                progress.show(self.removed.frames, self.removed.stored_bytes, self._run.store.share_walked())
            self._remove()
            if self._run.interruption.asked:
                return
            if self._run.filter.whole_namespaces:
                self._sweep(namespaces)
            self.complete = True
        finally:
            progress.clear()

    def _remove(self) -> None:
        only_unused = self._run.filter.older_s is not None
        self.removed += self._run.store.remove(self._batch, only_unused=only_unused)
        self._batch.clear()

    def _sweep(self, namespaces: set[bytes]) -> None:
        known = {found.digest for found in self._run.store.namespaces()}
        for digest in sorted(namespaces | known):
            if digest.hex().startswith(self._run.filter.namespace_prefix):
                self._run.store.sweep(digest)


def _finish(run: Run, matched: Removal, removed: Removal, *, dry_run: bool, complete: bool, seconds: float) -> None:
    run.document(
        "purge",
        {
            "seconds": round(seconds, 3),
            "complete": complete,
            "dry_run": dry_run,
            "matched_frames": matched.frames,
            "matched_bytes": matched.stored_bytes,
            "removed_frames": removed.frames,
            "removed_bytes": removed.stored_bytes,
        },
    )
    start = "" if complete else "interrupted: "
    if dry_run:
        run.print_line(f"{start}would remove {_amount(matched)} {run.filter} from the {run.where}")
    else:
        run.print_line(
            f"{start}removed {_amount(removed)} {run.filter} from the {run.where} in {format_seconds(seconds)}"
        )
        kept = matched.frames - removed.frames
        if kept and complete and removed.frames:
            run.print_line(f"{plural(kept, 'frame')} had been used or replaced meanwhile, or were gone already")
        if removed.frames and "slab" in run.store.layout:
            run.print_line("slabs keep their size on the disk; engines fill the freed slots again")


def _amount(count: Removal) -> str:
    return f"{plural(count.frames, 'frame')} ({format_bytes(count.stored_bytes)})"
