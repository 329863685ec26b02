"""Drives the real stack for the cross-process tests: engines, gateway, stores, streams, faults and leftovers."""
