"""The identity of weights and adapters, by their bytes."""
