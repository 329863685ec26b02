"""Spillway's behaviour on each supported vLLM, with real engines: one case for each column of the table."""
