"""Lanes of tests, by what a test needs: `rules.py` says it, `plugin.py` holds it, `python -m lanes` runs them."""
