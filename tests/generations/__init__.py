"""What Spillway does on each supported vLLM, with real engines: one case for each column of the table."""
