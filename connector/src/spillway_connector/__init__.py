"""Spillway's KV offload connector: device to CPU memory to a shared Redis or NVMe tier, inside vLLM."""
