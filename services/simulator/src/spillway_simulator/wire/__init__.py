"""The formats of engines on the wire: KV events, metrics, OpenAI documents, tokens."""
