"""Spillway's classes in the tests of vLLM 0.33."""

from __future__ import annotations

from upstream.substitutes_v032 import SUBSTITUTES

__all__ = ["SUBSTITUTES"]
