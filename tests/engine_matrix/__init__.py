"""Models of every KV layout through the real vLLM engine, with and without offload: `python -m engine_matrix`."""
