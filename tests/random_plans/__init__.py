"""Random layouts and jobs through the planner and the copier, against a model that moves one byte at a time."""
