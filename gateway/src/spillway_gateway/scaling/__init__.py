"""What the gateway does when engines come and go: what removing a pod would cost, and a new engine's warm start."""
