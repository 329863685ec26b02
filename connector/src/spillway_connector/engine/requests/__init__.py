"""The connector's state of one request: its owner, what its client asked for, its keys."""
