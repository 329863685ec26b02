"""HTTP endpoints: one module per OpenAI route."""
