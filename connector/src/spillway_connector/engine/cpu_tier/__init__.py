"""The rows of the CPU tier: which chunk is in which row, and which may be evicted."""
