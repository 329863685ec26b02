"""Spillway's gateway: an OpenAI-compatible front door that routes by prefix to the engine holding its KV cache."""
