"""Our log lines, in the engine's own format and at its own level."""

from __future__ import annotations

import logging


def join_engine_logging() -> None:
    """Send every `spillway_connector.*` record where vLLM's go. Twice is harmless."""
    ours, engines = logging.getLogger("spillway_connector"), logging.getLogger("vllm")
    ours.handlers = list(engines.handlers)
    ours.setLevel(engines.level)
    ours.propagate = engines.propagate
