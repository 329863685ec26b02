"""Every way in which an engine pod refuses to start; each message names setting, value, need and remedy."""

from __future__ import annotations


class EngineServiceError(Exception):
    """Root of this package's errors; the entry point prints the message alone and exits with `exit_code`."""

    exit_code = 2


class SettingsError(EngineServiceError):
    """A setting is unknown, malformed or contradicts another one."""


class ModelShapeError(EngineServiceError):
    """The model's config.json lacks what decides the size of its KV cache."""


class BudgetError(EngineServiceError):
    """The configuration cannot fit into this machine's memory."""
