"""Export of finished spans: a bounded queue, a thread, OTLP over HTTP."""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from spillway_gateway.config.tracing import TracingConfig
from spillway_gateway.tracing.request_trace import RequestTrace
from spillway_gateway.upstream.forward import Headers

SPANS_PER_EXPORT_MAX = 512


class Tracing:
    """One per gateway. Never raises while requests run: the SDK drops and logs spans that it cannot export."""

    def __init__(self, config: TracingConfig) -> None:
        assert config.otlp_endpoint is not None
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            resource=Resource.create({SERVICE_NAME: config.service_name}),
            span_limits=SpanLimits(),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                OTLPSpanExporter(endpoint=config.otlp_endpoint, timeout=config.export_seconds),
                max_queue_size=config.waiting_spans_max,
                schedule_delay_millis=1000 * config.export_seconds,
                max_export_batch_size=min(SPANS_PER_EXPORT_MAX, config.waiting_spans_max),
                export_timeout_millis=1000 * config.export_seconds,
            )
        )
        self._tracer = self._provider.get_tracer("spillway_gateway")

    def request(self, method: str, route: str, headers: Headers) -> RequestTrace:
        """Begin the span of a client's request. headers: the client's, names in lower case. On the event loop."""
        return RequestTrace(self._tracer, method, route, headers)

    def close(self) -> None:
        """Export queued spans within the time of one export and end the thread. Blocks: not on the event loop."""
        self._provider.shutdown()
