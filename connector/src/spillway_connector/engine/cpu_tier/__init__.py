"""Which chunk is in which row of the CPU tier, and which may be evicted."""
