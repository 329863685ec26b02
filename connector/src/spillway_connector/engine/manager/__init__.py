"""vLLM's offloading manager: look-ups of whole prefixes, promotions, stores, early loads."""
