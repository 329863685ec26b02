"""What a chunk's key and namespace follow from: vLLM's configuration, the weights, LoRA adapters."""
