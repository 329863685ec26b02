"""Bytes to an engine and bytes back, and whether another engine may be tried."""
