"""Refusals of the command: the message alone is printed, and the exit status is 2."""

from __future__ import annotations


class CommandError(Exception):
    """The arguments cannot be carried out; the message names what to change."""
