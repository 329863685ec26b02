"""The operator's command `spillway`."""
