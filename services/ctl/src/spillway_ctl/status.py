"""`spillway tier status`: which namespaces and tenants there are, what they take, and what looks damaged."""

from __future__ import annotations

import time
from typing import Any

from spillway_connector.tiers.inspection import StoredNamespace
from spillway_ctl.census import Census, Count, NamespaceCount, largest_first
from spillway_ctl.frame_filter import tenant_name
from spillway_ctl.namespace_summary import describe
from spillway_ctl.quantities import format_age, format_bytes, format_share, plural
from spillway_ctl.run import INTERRUPTED, OK, Run
from spillway_ctl.store import Extent

TENANTS_SHOWN = 10  # per namespace; --json has all


def status(run: Run) -> int:
    """Raises TierError."""
    run.store.check()
    began = time.monotonic()
    census = Census()
    progress = run.progress("looked at")
    for frame in run.frames(headers=True):
        census.add(frame)
        total = census.total
        progress.show(total.frames, total.stored_bytes, run.store.share_walked())
    progress.clear()
    stored = {found.digest: found for found in run.store.namespaces()}
    namespaces = [
        stored.get(digest, StoredNamespace(digest, None))
        for digest in sorted({*stored, *census.namespaces})
        if digest.hex().startswith(run.filter.namespace_prefix)
    ]
    extent, notes = run.store.extent(), run.store.notes()
    interrupted = run.interruption.asked
    run.document(
        "status",
        {
            "seconds": round(time.monotonic() - began, 3),
            "complete": not interrupted,
            "used_bytes": extent.used_bytes,
            "limit_bytes": extent.limit_bytes,
            "limit_means": extent.limit_means,
            "frames": census.total.frames,
            "stored_bytes": census.total.stored_bytes,
            "damaged_frames": census.damage.total(),
            "damage": dict(census.damage),
            "namespaces": [_as_json(found, census.namespaces.get(found.digest)) for found in namespaces],
            "notes": notes,
        },
    )
    _say_summary(run, extent, census, notes)
    for found in namespaces:
        count = census.namespaces.get(found.digest)
        if count is not None:
            _say_namespace(run, found, count)
    empty = sum(found.digest not in census.namespaces for found in namespaces)
    if empty and census.total.frames:
        run.print_line(f"\n{plural(empty, 'further namespace')} without frames: a document alone (--json shows it)")
    if interrupted:
        run.print_line("\ninterrupted: the figures are of a part of the frames")
    return INTERRUPTED if interrupted else OK


def _say_summary(run: Run, extent: Extent, census: Census, notes: list[str]) -> None:
    run.print_line(run.where)
    if extent.used_bytes is not None:
        limit = f"({extent.limit_means})"
        if extent.limit_bytes is not None:
            share = format_share(extent.used_bytes, extent.limit_bytes)
            limit = f"of {format_bytes(extent.limit_bytes)} ({share}; the limit is {extent.limit_means})"
        run.print_line(f"  in use      {format_bytes(extent.used_bytes)} {limit}")
    if not census.total.frames:
        run.print_line(
            "  nothing is stored here yet" if run.filter.is_everything else f"  nothing is stored here {run.filter}"
        )
    else:
        damaged = census.damage.total()
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(census.damage.items()))
        run.print_line(f"  frames      {census.total.frames:,} ({format_bytes(census.total.stored_bytes)})")
        run.print_line(
            f"  damaged     {f'{damaged:,} ({reasons})' if damaged else '0'} judging by headers; "
            "`spillway tier verify` reads payloads too"
        )
    for note in notes:
        run.print_line(f"  note        {note}")


def _say_namespace(run: Run, found: StoredNamespace, count: NamespaceCount) -> None:
    run.print_line(f"\nnamespace {found.digest.hex()}")
    wrong = found.damage()
    if wrong is not None:
        run.print_line(f"  document    {wrong.sentence}")
    for label, text in describe(found.facts or {}).items() if found.facts else ():
        run.print_line(f"  {label:<10}  {text}")
    run.print_line(
        f"  frames      {count.total.frames:,} ({format_bytes(count.total.stored_bytes)}), {_ages(run, count)}"
    )
    if count.damage:
        run.print_line(f"  damaged     {', '.join(f'{reason} {n:,}' for reason, n in sorted(count.damage.items()))}")
    everyone = list(largest_first(count.tenants))
    label = "tenants"
    for tenant, held in everyone[:TENANTS_SHOWN]:
        amount = f"{plural(held.frames, 'frame'):>16}  {format_bytes(held.stored_bytes)}"
        run.print_line(f"  {label:<10}  {tenant_name(tenant):<16}  {amount}")
        label = ""
    rest = [held for _, held in everyone[TENANTS_SHOWN:]]
    if rest or count.other_tenants.frames:
        others = f"{plural(len(rest), 'other')}" if not count.other_tenants.frames else "all others"
        frames = sum(held.frames for held in rest) + count.other_tenants.frames
        size = sum(held.stored_bytes for held in rest) + count.other_tenants.stored_bytes
        run.print_line(f"  {'':<10}  {others:<16}  {plural(frames, 'frame'):>16}  {format_bytes(size)}")


def _ages(run: Run, count: NamespaceCount) -> str:
    verb = "last used" if run.store.kind == "nvme" else "stored"
    if count.oldest_s is None or count.newest_s is None:
        return f"{verb} at unknown times"
    if count.total.frames == 1:
        return f"{verb} {format_age(run.now_s, count.newest_s)}"
    newest, oldest = format_age(run.now_s, count.newest_s), format_age(run.now_s, count.oldest_s)
    return f"{verb} {newest}" if newest == oldest else f"{verb} {newest.removesuffix(' ago')} to {oldest}"


def _as_json(found: StoredNamespace, count: NamespaceCount | None) -> dict[str, Any]:
    count = count or NamespaceCount()
    wrong = found.damage()
    return {
        "namespace": found.digest.hex(),
        "document": found.facts,
        "document_damage": None if wrong is None else wrong.sentence,
        "words": describe(found.facts) if found.facts else {},
        "encrypted": found.codec is not None,
        "frames": count.total.frames,
        "stored_bytes": count.total.stored_bytes,
        "oldest_unix_seconds": count.oldest_s,
        "newest_unix_seconds": count.newest_s,
        "damaged_frames": count.damage.total(),
        "damage": dict(count.damage),
        "tenants": [{"tenant": tenant.hex(), **_held(held)} for tenant, held in largest_first(count.tenants)],
        "other_tenants": _held(count.other_tenants),
        "unknown_tenant": _held(count.unknown_tenant),
    }


def _held(count: Count) -> dict[str, int]:
    return {"frames": count.frames, "stored_bytes": count.stored_bytes}
