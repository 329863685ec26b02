"""Spillway's log records among vLLM's."""

from __future__ import annotations

import logging


def join_engine_logging() -> None:
    """Send every `spillway_connector.*` record to vLLM's handlers, at vLLM's level. Idempotent."""
    ours, engines = logging.getLogger("spillway_connector"), logging.getLogger("vllm")
    ours.handlers = list(engines.handlers)
    ours.setLevel(engines.level)
    ours.propagate = engines.propagate
