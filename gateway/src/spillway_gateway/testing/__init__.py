"""A loopback engine with named faults, for tests of the gateway and of what is built on it."""
