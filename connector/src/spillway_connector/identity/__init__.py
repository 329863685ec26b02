"""What weights and adapters are, by their bytes."""
