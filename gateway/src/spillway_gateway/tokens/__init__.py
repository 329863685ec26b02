"""Turns a request body into the blocks that routing hashes."""
