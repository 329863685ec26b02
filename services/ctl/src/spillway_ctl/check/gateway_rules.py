"""Rules of the gateway: scaling, memory, times, the audit file, traces and who may ask it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from spillway_ctl.check.engine_rules import volume_names
from spillway_ctl.check.finding import (
    Finding,
    below,
    bytes_text,
    milli_cores,
    number,
    quantity,
    quoted,
    shown_url,
    size,
)
from spillway_ctl.check.group import Release
from spillway_ctl.check.shared_rules import (
    HOST,
    behavior,
    closed_way,
    is_own_pod,
    not_above,
    replica_bounds,
    variables,
)
from spillway_settings.gateway_memory import PROCESS_BYTES, TOKENIZER_BYTES
from spillway_settings.shared_names import VARIABLES

_ROOM_BYTES_LEAST = 64 << 20
_OTLP = re.compile(rf"https?://{HOST}/[^ ]*")
_CREDENTIAL_HEADERS = ("authorization", "proxy-authorization", "cookie", "x-api-key", "api-key")
_READ_ONLY_SOURCES = {"configMap", "secret", "projected", "downwardAPI"}


def gateway_findings(release: Release) -> Iterator[Finding]:
    yield from _scaling(release)
    yield from _memory(release)
    yield from _times(release)
    yield from _retries(release)
    yield from _sessions(release)
    yield from _bodies(release)
    yield from _tokenizers(release)
    yield from _operations(release)
    yield from _picker(release)
    yield from _cores(release)
    yield from _audit(release)
    yield from _traces(release)
    name_there = "name the Secret in gateway.auth.sharedLimits.existingSecret"
    own = dict.fromkeys((VARIABLES["limitsUsername"], VARIABLES["limitsPassword"]), name_there)
    yield from variables("gateway.extraEnvVars", release.values.gateway.extra_env_vars, own)
    yield from volume_names("gateway", release.values.gateway.extra_volumes, ("config", "scratch", "secrets"))


def _scaling(release: Release) -> Iterator[Finding]:
    gateway = release.values.gateway
    scaling = gateway.autoscaling
    yield from replica_bounds("gateway.autoscaling", scaling)
    yield from behavior("gateway.autoscaling.behavior", scaling.behavior)
    if scaling.enabled and not gateway.resources.requests.cpu:
        yield Finding(
            "gateway.resources.requests.cpu",
            "null given, but gateway.autoscaling.cpuPercent is a share of it",
            'set it, e.g. "1"',
        )


def _memory(release: Release) -> Iterator[Finding]:
    gateway = release.values.gateway
    requests, limits = gateway.resources.requests, gateway.resources.limits
    if not limits.memory:
        return
    asked, bound = ("requests.memory", requests.memory), ("limits.memory", limits.memory)
    yield from not_above("gateway.resources", asked, bound, size)
    limit = size(limits.memory)
    index, bodies = size(gateway.index.bytes_max), size(gateway.limits.bodies_bytes_max)
    replies, models = size(gateway.limits.replies_bytes_max), len(release.groups)
    # Each process of several has a tokenizer and buffers. One more has the index.
    serving = gateway.processes
    processes = serving + 1 if serving > 1 else 1
    needed = index * models + processes * (TOKENIZER_BYTES * models + PROCESS_BYTES) + bodies + replies
    if limit < needed:
        own, tokenizer = bytes_text(PROCESS_BYTES), f"{bytes_text(TOKENIZER_BYTES)} of tokenizer"
        bounded = f"limits.bodiesBytesMax {bytes_text(bodies)}, limits.repliesBytesMax {bytes_text(replies)}"
        parts = (
            f"gateway.index.bytesMax {bytes_text(index)} and {tokenizer} x {models} models, {bounded}, {own} for the "
            "process"
        )
        if processes > 1:
            parts = (
                f"gateway.index.bytesMax {bytes_text(index)} x {models} models, {bounded}, {own} and {tokenizer} for "
                f"each model in each of {processes} processes (gateway.processes: {serving} and one that routes)"
            )
        yield Finding(
            "gateway.resources.limits.memory",
            f"{bytes_text(limit)} cannot hold {parts}",
            f"set it to {quantity(needed)} or more, or lower those",
        )
    # Memory that one request or stream may take beside those.
    room = max(_ROOM_BYTES_LEAST, limit - needed)
    single = {
        "limits.plainReplyBufferBytes": gateway.limits.plain_reply_buffer_bytes,
        "connections.headBytesMax": gateway.connections.head_bytes_max,
    }
    if gateway.continuation.enabled:
        single["continuation.bytesMax"] = gateway.continuation.bytes_max
    for key, value in single.items():
        if size(value) > room:
            yield Finding(
                f"gateway.{key}",
                f"{number(value)} given, at most {bytes_text(room)} needed, which resources.limits.memory: "
                f"{number(limits.memory)} leaves beside index, bodies, replies, tokenizers and processes",
                "lower it, or raise the limit",
            )


def _times(release: Release) -> Iterator[Finding]:
    gateway = release.values.gateway
    lifecycles = [group.engine.lifecycle for group in release.groups]
    ends = [each.drain_delay_seconds + each.drain_timeout_seconds for each in lifecycles]
    least = min((end for end in ends if end > 0), default=0.0)
    if least > 0 and (gateway.health.ending_seconds or 0) >= least:
        yield Finding(
            "gateway.health.endingSeconds",
            f"{number(gateway.health.ending_seconds)} is not before the engines' own limit, drainDelaySeconds and "
            f"drainTimeoutSeconds of engine.lifecycle, {number(least)} s together",
            "lower it, or leave it null",
        )
    if gateway.continuation.enabled and gateway.continuation.stall_seconds > gateway.timeouts.idle_seconds:
        yield Finding(
            "gateway.continuation.stallSeconds",
            f"{number(gateway.continuation.stall_seconds)} given, but a stream without an event ends after "
            f"timeouts.idleSeconds: {number(gateway.timeouts.idle_seconds)}",
            "lower the first, or raise the second",
        )
    limits = gateway.auth.shared_limits
    if limits.url and limits.lease_seconds < 10 * limits.report_seconds:
        yield Finding(
            "gateway.auth.sharedLimits.leaseSeconds",
            f"{number(limits.lease_seconds)} given, at least ten times reportSeconds: {number(limits.report_seconds)} "
            "needed",
            "raise it",
        )
    breaker = gateway.breaker
    if breaker.open_seconds_max < breaker.open_seconds:
        yield Finding(
            "gateway.breaker.openSecondsMax",
            f"{number(breaker.open_seconds_max)} is less than openSeconds: {number(breaker.open_seconds)}, "
            "from which it grows",
            "raise openSecondsMax or lower openSeconds",
        )


def _retries(release: Release) -> Iterator[Finding]:
    limits = release.values.gateway.limits
    if limits.retry_ratio > limits.attempts_max:
        yield Finding(
            "gateway.limits.retryRatio",
            f"{number(limits.retry_ratio)} retries for each request given, and a request has at most attemptsMax: "
            f"{limits.attempts_max} attempts",
            f"write {limits.retry_ratio / 100:g} for {number(limits.retry_ratio)} %",
        )


def _sessions(release: Release) -> Iterator[Finding]:
    for index, source in enumerate(release.values.gateway.routing.session_sources):
        if source.lower() in _CREDENTIAL_HEADERS:
            yield Finding(
                f"gateway.routing.sessionSources[{index}]",
                f"{source} holds a credential, which is the same for all sessions of its owner",
                "remove it; sessions that name themselves by nothing are known by their prompts",
            )


def _bodies(release: Release) -> Iterator[Finding]:
    gateway = release.values.gateway
    longest, together = size(gateway.limits.body_bytes_max), size(gateway.limits.bodies_bytes_max)
    least = (longest * 4 * gateway.processes + 2) // 3  # bodies above 1 MiB get three quarters of it
    if together < least:
        each = f" in each of {gateway.processes} processes" if gateway.processes > 1 else ""
        yield Finding(
            "gateway.limits.bodiesBytesMax",
            f"{number(gateway.limits.bodies_bytes_max)} given, at least {quantity(least)} needed for one body of "
            f"bodyBytesMax: {number(gateway.limits.body_bytes_max)}{each}, as long bodies get three quarters of it",
            "raise it, or lower bodyBytesMax",
        )


def _tokenizers(release: Release) -> Iterator[Finding]:
    gateway = release.values.gateway
    is_own_image = gateway.image.tag or gateway.image.digest or gateway.image.repository != "spillway-gateway"
    for group in release.groups:
        tokenizer = group.engine.model.tokenizer
        is_brought = any(below(tokenizer, mount["mountPath"]) for mount in gateway.extra_volume_mounts)
        if tokenizer.startswith("/") and not is_brought and not is_own_image:
            yield Finding(
                f"{group.path}.model.tokenizer",
                f"{tokenizer} is a folder in the gateway's pod, but nothing brings it",
                "mount it with gateway.extraVolumes and extraVolumeMounts, or write volume or none",
            )


def _operations(release: Release) -> Iterator[Finding]:
    gateway, monitors = release.values.gateway, release.values.monitoring.service_monitor.enabled
    if gateway.ops_port:
        if gateway.ops_port == gateway.port:
            yield Finding("gateway.opsPort", f"{gateway.ops_port} is also port", "give each its own")
    elif gateway.tls.secret.name and monitors:
        yield Finding(
            "monitoring.serviceMonitor.enabled",
            "true, but gateway.tls closes /metrics to plain HTTP",
            "set gateway.opsPort, e.g. 8001: Prometheus needs no certificate there",
        )
    elif gateway.auth.keys_secret.name and monitors:
        yield Finding(
            "monitoring.serviceMonitor.enabled",
            "true, but with gateway.auth.keysSecret /metrics on the port of clients requires an operator's key",
            "set gateway.opsPort, e.g. 8001: it needs no key there",
        )


def _picker(release: Release) -> Iterator[Finding]:
    gateway = release.values.gateway
    picker = gateway.picker
    if not picker.enabled:
        return
    for setting, port in (("port", gateway.port), ("opsPort", gateway.ops_port)):
        if port == picker.port:
            yield Finding("gateway.picker.port", f"{picker.port} is also gateway.{setting}", "give each its own")
    policy = release.values.network_policy
    if policy.enabled and not policy.engine_from:
        yield Finding(
            "networkPolicy.engineFrom",
            "[] with gateway.picker.enabled, so that only the gateway may connect to engines, and no proxy",
            "name the proxy's pods, e.g. [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: "
            "envoy-gateway-system}}}]",
        )
    if gateway.discovery.type == "static":
        yield Finding(
            "gateway.picker.enabled",
            "true with gateway.discovery.type: static, whose engines have names, and proxies take addresses alone",
            "set gateway.discovery.type: kubernetes or dns",
        )


def _cores(release: Release) -> Iterator[Finding]:
    gateway = release.values.gateway
    requests, limits = gateway.resources.requests, gateway.resources.limits
    for kind, cpu in (("requests", requests.cpu), ("limits", limits.cpu)):
        if cpu and milli_cores(cpu) < 20:
            yield Finding(
                f"gateway.resources.{kind}.cpu",
                f"{number(cpu)} given, at least 20m needed",
                'whole cores have no unit: write "1"',
            )
    if limits.cpu and gateway.processes > 1 and milli_cores(limits.cpu) < 1000 * gateway.processes:
        yield Finding(
            "gateway.processes",
            f"{gateway.processes} given, but resources.limits.cpu: {number(limits.cpu)} lets fewer of them work at a "
            "time",
            f'raise the limit to "{gateway.processes}" or more, or set it to null, or lower processes',
        )
    asked = ("requests.ephemeralStorage", requests.ephemeral_storage)
    yield from not_above("gateway.resources", asked, ("limits.ephemeralStorage", limits.ephemeral_storage), size)


def _audit(release: Release) -> Iterator[Finding]:
    gateway = release.values.gateway
    file = gateway.audit.file
    if not file:
        return
    sources = {volume["name"]: volume for volume in gateway.extra_volumes}
    around = [each for each in gateway.extra_volume_mounts if file.startswith(f"{each['mountPath'].rstrip('/')}/")]
    for mount in around:
        if mount.get("readOnly") or _READ_ONLY_SOURCES & sources.get(mount["name"], {}).keys():
            yield Finding(
                "gateway.audit.file",
                f"{file} lies in {mount['mountPath']}, where volume {mount['name']} is read-only",
                "mount one that can be written to",
            )
    if not around:
        where = "in the image, which is read-only"
        if file.startswith("/tmp/"):  # noqa: S108 - of the pod
            where = "in /tmp, for whose 256 MiB kubelet evicts the pod once they are full"
        yield Finding(
            "gateway.audit.file",
            f"{file} lies {where}",
            "mount its folder with extraVolumes and extraVolumeMounts, or set null for standard output",
        )
    if not gateway.audit.enabled:
        yield Finding("gateway.audit.file", f"{file}, but audit.enabled is false", "set it to true, or file: null")


def _traces(release: Release) -> Iterator[Finding]:
    endpoint = release.values.gateway.tracing.otlp_endpoint
    if endpoint and "@" in endpoint:
        yield Finding(
            "gateway.tracing.otlpEndpoint",
            "holds credentials, which would lie in a ConfigMap",
            "give them as a header by OTEL_EXPORTER_OTLP_HEADERS in gateway.extraEnvVars with valueFrom.secretKeyRef",
        )
    elif endpoint and _OTLP.fullmatch(endpoint) is None:
        yield Finding(
            "gateway.tracing.otlpEndpoint",
            f"{quoted(shown_url(endpoint))} is no address with its path",
            "write http://collector:4318/v1/traces, or null for no traces",
        )
    elif endpoint and (other := re.search(r"/v1/(metrics|logs)/?$", endpoint)):
        yield Finding(
            "gateway.tracing.otlpEndpoint",
            f"it ends in {other[0]}, where a collector takes {other[1]} and refuses traces",
            "write /v1/traces in its place",
        )
    elif endpoint and is_own_pod(endpoint) and not release.values.gateway.sidecars:
        yield Finding(
            "gateway.tracing.otlpEndpoint",
            f"{shown_url(endpoint)} is the gateway's own pod, in which no collector is, unless one is injected",
            "write the name of the collector's Service, such as http://collector.monitoring.svc:4318/v1/traces",
            is_note=True,
        )
    url = release.values.gateway.auth.shared_limits.url
    for setting, address in (("gateway.auth.sharedLimits.url", url), ("gateway.tracing.otlpEndpoint", endpoint)):
        if address:
            to = f"{setting}: {shown_url(address)}"
            yield from closed_way(release.values.network_policy, "gatewayEgress", to)
