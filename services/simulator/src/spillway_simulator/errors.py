"""The errors of the simulator, each with what to change."""

from __future__ import annotations


class SimulatorError(Exception):
    """Base of every error of the simulator."""


class SettingsError(SimulatorError):
    """A setting is missing, unknown or out of range."""


class RequestTooLong(SimulatorError):
    """A request that no empty engine could hold: prompt and answer exceed the device or the model's length."""
