"""A CPU tier, a small NVMe tier and a bucket behind it, under a real engine."""
