"""Settings of OpenTelemetry traces."""

from __future__ import annotations

from urllib.parse import urlsplit

from spillway_gateway.errors import ConfigError
from spillway_settings.typed import CamelSection, Count, Portion, Positive, Text
from spillway_settings.values.gateway import Tracing

_CHART = Tracing()


class TracingConfig(CamelSection, frozen=True):
    """Export of traces, off without an endpoint. Headers for the collector come from the environment,
    OTEL_EXPORTER_OTLP_HEADERS, as they may hold a key; further attributes of the resource come from
    OTEL_RESOURCE_ATTRIBUTES."""

    otlp_endpoint: Text | None = None  # OTLP over HTTP: http://collector:4318/v1/traces
    # The share of requests that are sampled if their caller does not decide it by a traceparent.
    sample_ratio: Portion = _CHART.sample_ratio
    service_name: Text = _CHART.service_name
    export_seconds: Positive = _CHART.export_seconds  # between two exports, and the most that one may take
    # beyond them spans are dropped: a slow collector delays no request
    waiting_spans_max: Count = _CHART.waiting_spans_max


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
