"""The scheduler half of the connector, in vLLM's EngineCore process."""
