"""Configuration, weights and LoRA adapters of vLLM, as far as a chunk's key and namespace follow from them."""
