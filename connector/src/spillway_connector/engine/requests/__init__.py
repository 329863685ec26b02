"""What the connector knows of one request: its owner, what its client asked for, its keys."""
