"""`make demo`: what each tier saves, measured on the running stack and checked against the engines' counters."""

from spillway_stack.demo.command import main

__all__ = ["main"]
