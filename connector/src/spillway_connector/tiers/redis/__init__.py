"""The Redis tier."""
