"""The conclusions of `spillway doctor` and `helm test` about an engine's shared tiers, from its own counters. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spillway_connector.explanations import MISSES, explanation
from spillway_ctl.evidence import NO_REPORT, EngineReading, Finding, Verdict
from spillway_settings.wire import WEIGHTS_PATH

FAILURES = "spillway_tier_failures_total"


def shared_tiers(engine: EngineReading, window_seconds: float) -> Iterator[Finding]:
    """One finding for the shared tier, and one for the tier below it."""
    kind, below = (engine.setting("offload", "sharedTier", *path, "type") for path in ((), ("below",)))
    yield _shared_tier(engine, window_seconds, "shared tier", kind)
    if below not in (None, "none") and kind != "none" and engine.setting("offload", "enabled") is not False:
        yield _shared_tier(engine, window_seconds, "tier below it", below)


def missed(engines: Sequence[EngineReading]) -> str:
    """Find out why chunks did not come from shared tiers within the window: each reason with its meaning."""
    reasons = sorted({reason for engine in engines for reason in engine.reasons("spillway_tier_misses_total", {})})
    return ", ".join(f"{reason} ({MISSES[reason]})" if reason in MISSES else reason for reason in reasons) or "none"


def _shared_tier(engine: EngineReading, window_seconds: float, name: str, kind: Any) -> Finding:
    page = engine.after
    if engine.setting("offload", "enabled") is False or kind == "none":
        return Finding(name, engine.name, Verdict.OK, "none is configured")
    if page is None:
        return Finding(name, engine.name, Verdict.NOT_CHECKED, "it shows no /metrics")
    if unshared := set(engine.held("not_shared").values()):
        change = (
            "load the model from a folder or a hub's cache, or set offload.weightsVersion; see Weights and adapters"
        )
        return Finding(name, engine.name, Verdict.FAILED, f"not used: {'; '.join(sorted(unshared))}", change)
    own = {} if kind is None else {"tier": str(kind)}
    ready = page.series("spillway_tier_ready", **own)
    if not ready:
        return Finding(name, engine.name, Verdict.NOT_CHECKED, NO_REPORT)
    place = _place(engine, kind)
    meanings, remedies = _explained(engine.reasons(FAILURES, own) or engine.reasons(FAILURES, own, ever=True), kind)
    change = remedies or "the engine's log has the reason; the engine uses the tier again by itself"
    away = [labels.get("tier", "?") for labels, value in ready if not value]
    if away:
        found = f"{', '.join(away)} at {place} cannot be used{meanings and f': {meanings}'}"
        return Finding(name, engine.name, Verdict.FAILED, found, change)
    resting = sorted(
        labels.get("operation", "?") for labels, value in page.series("spillway_tier_breaker_open", **own) if value
    )
    if resting:
        found = f"{kind} at {place}: the breaker of {', '.join(resting)} is open after repeated failures"
        return Finding(name, engine.name, Verdict.FAILED, f"{found}{meanings and f': {meanings}'}", change)
    if page.total("spillway_tier_weights_changed"):
        change = f"name the new weights (POST {WEIGHTS_PATH} to the engine), or restart it"
        return Finding(name, engine.name, Verdict.FAILED, "rests: weights changed in place", change)
    now, since_start = engine.growth(FAILURES, **own)
    if now:
        found = f"{kind} at {place}: {now:.0f} operations failed within {window_seconds:.0f} s: {meanings}"
        return Finding(name, engine.name, Verdict.FAILED, found, change)
    found = f"{kind} at {place} is used; no failure within {window_seconds:.0f} s, {since_start:.0f} since the start"
    return Finding(name, engine.name, Verdict.OK, f"{found}{_out_of_the_way(engine, own)}")


def _out_of_the_way(engine: EngineReading, own: Mapping[str, str]) -> str:
    """Return which chunks a tier takes, if it does not get all of them at once; empty if it does."""
    page = engine.after
    if page is None or not page.total("spillway_tier_stores_wait", **own):
        return ""
    at_once, deferred, later = (
        page.total("spillway_tier_offered_chunks_total", **own, outcome=outcome) or 0.0
        for outcome in ("at_once", "deferred", "later")
    )
    share = 100 * (at_once + later) / max(1.0, at_once + deferred)
    paying = page.series("spillway_tier_loads_pay", **own)
    why = (
        "loads from it do not pay" if any(not value for _, value in paying) else "it is slower than the engine computes"
    )
    return (
        f"; it stays out of the way, since {why}: it has taken {share:.0f} % of the chunks offered to it, "
        "those that the CPU tier gives up next; more CPU blocks or a faster store help"
    )


def _explained(reasons: Mapping[str, Sequence[str]], kind: Any) -> tuple[str, str]:
    """(what the reasons mean, what to do), each remedy once. What only follows from other reasons is left out.

    Args:
        reasons: Each with the operations that failed for it.
        kind: The type of the tier.
    """
    known = {reason: explanation(reason, str(kind)) for reason in reasons}
    causes = {reason: said for reason, said in known.items() if said is None or said.remedy} or known
    meanings = []
    for reason, said in causes.items():
        label = " ".join(["/".join(reasons[reason]), reason]).strip()
        meanings.append(label if said is None else f"{said.meaning} ({label})")
    remedies = dict.fromkeys(said.remedy for said in causes.values() if said is not None and said.remedy)
    return "; ".join(meanings), "; ".join(remedies)


def _place(engine: EngineReading, kind: Any) -> str:
    """Name the tier's place, as configured."""
    settings = engine.setting("offload", "sharedTier", str(kind))
    settings = settings if isinstance(settings, dict) else {}
    if kind == "s3":
        at = f" at {settings['endpoint']}" if settings.get("endpoint") else ""
        return f"s3://{settings.get('bucket')}/{settings.get('prefix') or ''}{at}"
    return str(settings.get("url" if kind == "redis" else "path") or "?")
