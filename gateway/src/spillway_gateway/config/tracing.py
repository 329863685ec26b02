"""Settings of OpenTelemetry traces."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from spillway_gateway.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """Off without an endpoint. Headers for the collector come from the environment, OTEL_EXPORTER_OTLP_HEADERS, as they
    may hold a key; further attributes of the resource from OTEL_RESOURCE_ATTRIBUTES."""

    otlp_endpoint: str | None = None  # OTLP over HTTP: http://collector:4318/v1/traces
    sample_ratio: float = 1.0  # of requests without a caller's decision; a caller's traceparent decides otherwise
    service_name: str = "spillway-gateway"
    export_seconds: float = 5.0  # between two exports, and the most that one may take
    waiting_spans_max: int = 8192  # beyond them spans are dropped: a slow collector delays nobody


def check_tracing(config: TracingConfig) -> None:
    """Raises ConfigError."""
    endpoint = config.otlp_endpoint
    if endpoint is not None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"tracing.otlpEndpoint: {endpoint!r} given, a URL of an OTLP/HTTP receiver needed, such as "
                "http://collector:4318/v1/traces"
            )
    if not 0 <= config.sample_ratio <= 1:
        raise ConfigError(f"tracing.sampleRatio: {config.sample_ratio} given, a number from 0 to 1 needed")
    if not 0 < config.export_seconds < float("inf"):
        raise ConfigError(f"tracing.exportSeconds: {config.export_seconds} given, a finite number above 0 needed")
    if config.waiting_spans_max < 1:
        raise ConfigError(f"tracing.waitingSpansMax: {config.waiting_spans_max} given, at least 1 needed")
