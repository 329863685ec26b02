"""Tiers on a file system."""
