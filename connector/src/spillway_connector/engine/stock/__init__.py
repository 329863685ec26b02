"""Spillway's shared tiers inside vLLM's own tiering spec, version 0.30 and newer: no Spillway connector, no patch."""
