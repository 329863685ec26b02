"""Streamed answers that another engine goes on with after a failure: what the client has, and how the rest is made."""
