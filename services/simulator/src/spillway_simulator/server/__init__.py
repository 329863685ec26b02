"""Sockets and the wall clock around the engine model."""
