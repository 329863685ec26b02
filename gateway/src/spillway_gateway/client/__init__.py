"""Clients' connections: bounds, bodies, coalesced writes."""
