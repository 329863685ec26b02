"""What a process of the gateway takes of memory beside what its settings bound. The check of its limit goes by this,
and the gateway keeps to it."""

PROCESS_BYTES = 256 << 20  # with its buffers
TOKENIZER_BYTES = 192 << 20  # of each model: one of 150,000 tokens about 120, its cache 64
TOKENIZER_THREADS = 2
