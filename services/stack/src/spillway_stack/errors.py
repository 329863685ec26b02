"""Errors of the local stack; the command line shows their message alone."""

from __future__ import annotations


class StackError(Exception):
    """The base of the stack's errors. The command line prints the message and exits with status 1."""


class PreflightFailed(StackError):
    """Error: this machine cannot run the stack with these settings; one line per reason."""


class ComponentFailed(StackError):
    """A component exited before it was ready; holds its last log lines."""


class StackDiffers(StackError):
    """A stack with other settings is already running here."""


class NotReadyInTime(StackError):
    """The deadline passed while components were still starting."""
