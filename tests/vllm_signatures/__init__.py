"""Signatures that the connector relies on in a vLLM, read from its wheel without running it."""
