"""`make demo`: why offload exists, shown against the running stack and proven by the engines' own counters."""

from .command import main

__all__ = ["main"]
