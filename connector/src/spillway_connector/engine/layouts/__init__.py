"""Layouts of KV: in a device's caches, in a row of the CPU tier, and over the ranks and stages of a pipeline."""
