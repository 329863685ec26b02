"""Simulated inference engines: a deterministic model of time and caches, and an OpenAI surface over it."""
