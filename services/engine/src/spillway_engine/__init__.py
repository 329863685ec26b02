"""Spillway's engine service: the entry point of an engine pod, from typed settings to a running, draining vLLM."""
