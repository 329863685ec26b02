"""Routing policies side by side: Spillway's own code, blind ones, and rivals re-implemented from their descriptions."""
