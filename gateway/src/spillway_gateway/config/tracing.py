"""Settings of OpenTelemetry traces."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from spillway_gateway.errors import ConfigError
from spillway_settings.typed import CamelSection, Count, Positive, Text


class TracingConfig(CamelSection, frozen=True):
    """Off without an endpoint. Headers for the collector come from the environment, OTEL_EXPORTER_OTLP_HEADERS, as they
    may hold a key; further attributes of the resource from OTEL_RESOURCE_ATTRIBUTES."""

    otlp_endpoint: Text | None = None  # OTLP over HTTP: http://collector:4318/v1/traces
    # Of requests without a caller's decision; a caller's traceparent decides otherwise.
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    service_name: Text = "spillway-gateway"
    export_seconds: Positive = 5.0  # between two exports, and the most that one may take
    waiting_spans_max: Count = 8192  # beyond them spans are dropped: a slow collector delays no request


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
