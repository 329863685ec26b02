"""Faults at random under load: what `bench/soak.py` plans, does, watches and judges."""
