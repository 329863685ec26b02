"""A pytest plugin: Spillway's patches of vLLM in force too, as in an engine that has its connector."""

from __future__ import annotations

# Before ours, as vLLM's general plugins come before a connector.
import ascend_package.beside  # noqa: F401
from spillway_connector.testing.generation import patch_vllm

patch_vllm("failed-loads", "group-hits", "compute-while-loading", "failed-step-loads")
