"""CUDA transport."""
