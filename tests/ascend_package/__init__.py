"""Spillway beside vllm-ascend's own Python package, as far as that can be imported without an NPU."""
