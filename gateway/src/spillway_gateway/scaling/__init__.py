"""The scaling of engines: the cost of removing a pod, and a new engine's warm start."""
