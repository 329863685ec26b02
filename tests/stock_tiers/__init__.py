"""Spillway's tiers inside vLLM's own tiering (docs/stock-vllm.md), on the vLLM of the interpreter that runs them."""
