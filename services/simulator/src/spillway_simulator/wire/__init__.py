"""What engines put on the wire: KV events, metrics, OpenAI documents, tokens."""
