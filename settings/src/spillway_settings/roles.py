"""Roles of engines: the part of requests that each takes, and engines that can serve a model together."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum


class EngineRole(StrEnum):
    """PREFILL: computes long prompts, with which another engine goes on. DECODE: goes on with them. BOTH: stands in for
    either. All answer whole requests, prefill engines only if nothing else can or roles do not bind (roles_bind)."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


def missing_role(roles: Collection[EngineRole]) -> str | None:
    """Return what a model with engines of these roles lacks, as the end of a sentence; None: nothing."""
    given = set(roles)
    if given == {EngineRole.PREFILL}:
        return "has prefill engines alone; give one of them the role decode or both"
    if given == {EngineRole.DECODE}:
        return "has decode engines alone; give one of them the role prefill or both"
    return None
