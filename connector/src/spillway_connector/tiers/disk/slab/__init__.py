"""Preallocated slots and one index, for local disks."""
