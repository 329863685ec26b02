"""Lanes of tests, by what a test needs: defined by `rules.py`, enforced by `plugin.py`, run by `python -m lanes`."""
