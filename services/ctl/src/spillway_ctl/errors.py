"""Why the command says no. Its sentence is all that a person sees; the exit status is 2."""

from __future__ import annotations


class CommandError(Exception):
    """What was asked cannot be done as asked; the message says what to change."""
