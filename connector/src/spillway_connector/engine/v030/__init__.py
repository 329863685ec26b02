"""The connector in vLLM 0.30 and later."""
