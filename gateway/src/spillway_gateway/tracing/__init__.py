"""OpenTelemetry traces from client to engine. Imported only if tracing.otlpEndpoint is set."""
