"""The model of values.yaml: every setting of an installation with its type, bounds and default."""
