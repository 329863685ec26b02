"""The connector in vLLM 0.23 (vllm-ascend 0.23)."""
