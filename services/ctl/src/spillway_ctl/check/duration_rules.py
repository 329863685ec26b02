"""Rules of durations: waits that outlast their request, milliseconds for seconds, probes that end pods. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from spillway_ctl.check.chart_facts import fields_of
from spillway_ctl.check.finding import Finding, number
from spillway_ctl.check.group import Release
from spillway_settings.values.engine import Engine
from spillway_settings.values.gateway import Gateway
from spillway_settings.values.release import Monitoring

_ENGINE = Engine()
_DAY_SECONDS = 86400
_SECONDS = "durations are in seconds: 30 s are 30, five minutes 300"
_MILLISECONDS_LEAST = 1000
_TIMES_DEFAULT = 200  # a value that is so much longer, and a round number of milliseconds, was meant in milliseconds
_HOUR_SECONDS = 3600
_STALE_SECONDS = 300  # Prometheus drops a series without a newer sample
_LIVENESS_SECONDS_LEAST = 10  # an engine that compiles, or a gateway that reads a long prompt, answers late


def duration_findings(release: Release) -> Iterator[Finding]:
    named: set[str] = set()
    for finding in (*_waits(release), *_days(release), *_milliseconds(release)):
        if finding.setting not in named:
            named.add(finding.setting)
            yield finding
    yield from _liveness(release)
    yield from _scrapes(release)


def _waits(release: Release) -> Iterator[Finding]:
    """A request that has no first byte by then is ended by the gateway, whatever it still waits for."""
    timeouts = release.values.gateway.timeouts
    waits = {"gateway.timeouts.connectSeconds": timeouts.connect_seconds}
    for group in release.groups:
        offload, path = group.engine.offload, f"{group.path}.offload"
        if offload.enabled:
            waits[f"{path}.requestWaitSeconds"] = offload.request_wait_seconds
            waits[f"{path}.queueOvertakeSeconds"] = offload.queue_overtake_seconds
        if offload.enabled and offload.shared_tier.type != "none":
            waits[f"{path}.sharedTier.lookupTimeoutSeconds"] = offload.shared_tier.lookup_timeout_seconds
            if offload.shared_tier.below.type != "none":
                below = offload.shared_tier.below
                waits[f"{path}.sharedTier.below.lookupTimeoutSeconds"] = below.lookup_timeout_seconds
    for setting, seconds in waits.items():
        if seconds >= timeouts.first_byte_seconds:
            yield Finding(
                setting,
                f"{number(seconds)} given, but a request without a first byte ends after "
                f"gateway.timeouts.firstByteSeconds: {number(timeouts.first_byte_seconds)}",
                f"lower it; {_SECONDS}",
            )


def _days(release: Release) -> Iterator[Finding]:
    gateway = release.values.gateway
    sections: dict[str, msgspec.Struct] = {
        f"gateway.{name}": getattr(gateway, name)
        for name in ("timeouts", "connections", "continuation", "health", "admission", "lifecycle")
    }
    sections |= {f"{group.path}.lifecycle": group.engine.lifecycle for group in release.groups}
    sections |= {f"{group.path}.autoscaling": group.engine.autoscaling for group in release.groups}
    for path, section in sections.items():
        for field in fields_of(type(section)):
            seconds = getattr(section, field.name)
            is_duration = field.name.endswith("_seconds") and field.name != "cooldown_seconds"
            if is_duration and seconds is not None and seconds > _DAY_SECONDS:
                yield Finding(
                    f"{path}.{field.encode_name}",
                    f"{number(seconds)} given, which is longer than a day",
                    f"lower it; {_SECONDS}",
                )


def _milliseconds(release: Release) -> Iterator[Finding]:
    """Every duration of the values, held against its default."""
    engines = {group.path: group.engine for group in release.groups}
    parts: dict[str, Any] = {"gateway": release.values.gateway, "monitoring": release.values.monitoring, **engines}
    defaults = {"gateway": Gateway(), "monitoring": Monitoring()}
    for path, part in parts.items():
        for setting, seconds, default in _durations(part, defaults.get(path, _ENGINE), path):
            times = round(seconds / default, 6)
            if 0 < times <= 1 / _MILLISECONDS_LEAST:
                yield Finding(
                    setting,
                    f"{number(seconds)} given, which is a thousandth of the default or less",
                    f"raise it; {_SECONDS}",
                    is_note=True,
                )
            is_round = seconds >= _MILLISECONDS_LEAST and seconds % _MILLISECONDS_LEAST == 0
            if times == 1000 or (is_round and times >= _TIMES_DEFAULT and seconds % _HOUR_SECONDS):
                yield Finding(
                    setting,
                    f"{number(seconds)} given, which are {_as_time(seconds)} and {number(times)} times the default",
                    f"write {number(seconds / 1000)} if milliseconds were meant; {_SECONDS}",
                )


def _durations(section: msgspec.Struct, default: msgspec.Struct, path: str) -> Iterator[tuple[str, float, float]]:
    """(setting, seconds, its default) of every duration that has a default."""
    for field in fields_of(type(section)):
        value, ours, at = getattr(section, field.name), getattr(default, field.name), f"{path}.{field.encode_name}"
        if isinstance(value, msgspec.Struct) and isinstance(ours, msgspec.Struct):
            yield from _durations(value, ours, at)
        elif re.search(r"_seconds(_max)?$", field.name) and isinstance(value, int | float) and ours:
            yield at, value, ours


def _as_time(seconds: float) -> str:
    for unit, factor in (("days", _DAY_SECONDS), ("hours", _HOUR_SECONDS), ("minutes", 60)):
        if seconds >= factor * 2:
            return f"{seconds / factor:.3g} {unit}"
    return f"{number(seconds)} seconds"


def _scrapes(release: Release) -> Iterator[Finding]:
    monitoring = release.values.monitoring
    for name, monitor in (("podMonitor", monitoring.pod_monitor), ("serviceMonitor", monitoring.service_monitor)):
        if monitor.enabled and monitor.interval_seconds > _STALE_SECONDS:
            yield Finding(
                f"monitoring.{name}.intervalSeconds",
                f"{number(monitor.interval_seconds)} given, but Prometheus forgets a series after {_STALE_SECONDS} s "
                "without a sample, so that alerts and panels would find none in between",
                "set 60 or less, or raise Prometheus' query.lookback-delta",
                is_note=True,
            )


def _liveness(release: Release) -> Iterator[Finding]:
    probes = {"gateway": release.values.gateway.probes.liveness}
    probes |= {group.path: group.engine.probes.liveness for group in release.groups}
    for path, probe in probes.items():
        seconds = (probe.failure_threshold - 1) * probe.period_seconds + probe.timeout_seconds
        if seconds < _LIVENESS_SECONDS_LEAST:
            yield Finding(
                f"{path}.probes.liveness",
                f"a pod that answers {seconds} s late is killed with all of its requests (failureThreshold: "
                f"{probe.failure_threshold}, periodSeconds: {probe.period_seconds}, timeoutSeconds: "
                f"{probe.timeout_seconds})",
                f"raise them until they are {_LIVENESS_SECONDS_LEAST} s or more together",
            )
