"""What real engines of each vLLM do under the faults that a client, an operator or a kernel brings."""
