"""Sockets, TLS and the server that runs the gateway."""
