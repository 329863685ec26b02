"""Stands where vLLM would in the simulated engine image: the same module path, command line and HTTP server."""
