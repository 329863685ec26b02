"""Real engines of each vLLM under the faults that a client, an operator or a kernel brings."""
