"""Decisions without I/O: which engine takes a request, and why."""
