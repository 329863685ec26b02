"""The engine model: scheduler, caches and time. Pure: no clock, socket, thread or randomness."""
