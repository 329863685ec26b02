"""NPU transport."""
