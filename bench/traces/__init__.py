"""Seeded traces of prompts for routing experiments: pure generators, equal seeds give equal traces."""
