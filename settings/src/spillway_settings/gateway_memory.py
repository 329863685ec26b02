"""What a process of the gateway takes of memory beside what its settings bound. The check of its limit goes by this,
and the gateway keeps to it."""

PROCESS_BYTES = 256 << 20  # with its buffers
TOKENIZER_BYTES = 192 << 20  # of each model: one of 150,000 tokens about 120, its cache 64

# fastokens keeps the words that a thread has met, for all models together. As much as this if all text is new words,
# on the event loop until so many characters renew its tables, and on each other thread until its end.
EVENT_LOOP_WORDS_BYTES, WORDS_RENEWAL_CHARS = 224 << 20, 16 * 1024 * 1024
THREAD_WORDS_BYTES, TOKENIZER_THREADS = 128 << 20, 2
WORDS_BYTES = EVENT_LOOP_WORDS_BYTES + TOKENIZER_THREADS * THREAD_WORDS_BYTES
