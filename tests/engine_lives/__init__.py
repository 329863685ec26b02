"""Random lives of an engine: vLLM's real scheduler and both halves of the connector over memory that can be checked."""
