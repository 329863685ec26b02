"""`make demo`: why offload exists, shown against the running stack and proven by the engines' own counters."""

from spillway_stack.demo.command import main

__all__ = ["main"]
