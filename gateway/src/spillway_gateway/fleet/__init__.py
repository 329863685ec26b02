"""Keeps the picture of the fleet true: who exists, who answers, who holds which block."""
