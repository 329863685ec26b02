"""Rules of durations: waits that outlast their request, milliseconds for seconds, probes that end pods. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from spillway_ctl.check.finding import Finding, number
from spillway_ctl.check.group import Release

_DAY_SECONDS = 86400
_SECONDS = "durations are in seconds: 30 s are 30, five minutes 300"
_LIVENESS_SECONDS_LEAST = 10  # an engine that compiles, or a gateway that reads a long prompt, answers late


def duration_findings(release: Release) -> Iterator[Finding]:
    yield from _waits(release)
    yield from _days(release)
    yield from _liveness(release)


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
    sections: dict[str, Any] = {
        f"gateway.{name}": getattr(gateway, name)
        for name in ("timeouts", "connections", "continuation", "health", "admission", "lifecycle")
    }
    sections |= {f"{group.path}.lifecycle": group.engine.lifecycle for group in release.groups}
    for path, section in sections.items():
        for field in msgspec.structs.fields(section):
            seconds = getattr(section, field.name)
            if field.name.endswith("_seconds") and seconds is not None and seconds > _DAY_SECONDS:
                yield Finding(
                    f"{path}.{field.encode_name}",
                    f"{number(seconds)} given, which is longer than a day",
                    f"lower it; {_SECONDS}",
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
