"""From a request body to the blocks that routing hashes."""
