"""Every way in which the local stack says no; the message is all that a person sees."""

from __future__ import annotations


class StackError(Exception):
    """Root; the command line prints the message and exits with status 1."""


class PreflightFailed(StackError):
    """This machine cannot take the stack as asked; one line per reason."""


class ComponentFailed(StackError):
    """A component ended instead of getting ready; holds its last log lines."""


class StackDiffers(StackError):
    """A stack is running here with other settings."""


class NotReadyInTime(StackError):
    """The deadline passed while components were still starting."""
