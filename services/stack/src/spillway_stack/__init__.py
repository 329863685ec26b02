"""Spillway's local stack: engines, gateway and shared tiers on one machine, and the demo over them."""
