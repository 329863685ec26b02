"""The whole under load: engines, tiers, a router and agents. simulate.py simulates it, device_run.py runs it."""
