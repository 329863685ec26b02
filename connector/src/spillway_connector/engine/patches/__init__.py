"""Functions of vLLM that are replaced or added at run time: which, why, and the one place that does it."""
