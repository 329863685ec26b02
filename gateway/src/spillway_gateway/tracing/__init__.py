"""OpenTelemetry traces from client to engine. Imported where tracing.otlpEndpoint is set: off, they cost nothing."""
