"""The memory of a gateway process beside what its settings bound. The check of its limit uses these figures, and the
gateway keeps to them."""

PROCESS_BYTES = 256 << 20  # with its buffers
TOKENIZER_BYTES = 192 << 20  # of each model: one of 150,000 tokens about 120, its cache 64
TOKENIZER_THREADS = 2
