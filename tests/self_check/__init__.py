"""The engine's start-up check against real engines: healthy ones of every kind, and ones that are broken on purpose."""
