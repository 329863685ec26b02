"""Finds Spillway's connector at an engine's scheduler: alone, or beside others in vLLM's MultiConnector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from spillway_connector.errors import ConfigError

Kind = TypeVar("Kind")


def own_connector(scheduler: Any, kind: type[Kind]) -> Kind | None:
    """The scheduler's connector of this kind; None: it has none.

    Raises ConfigError if there are two: both would give out the same rows of the CPU tier.
    """
    found = [one for one in _connectors(getattr(scheduler, "connector", None)) if isinstance(one, kind)]
    if len(found) > 1:
        raise ConfigError(
            f"connectors: {len(found)} of them are Spillway's, and an engine has one CPU tier; leave one in the list"
        )
    return found[0] if found else None


def is_among_others(scheduler: Any) -> bool:
    """Whether another connector may load a request's KV, too."""
    return isinstance(getattr(scheduler, "connector", None), MultiConnector)


def _connectors(connector: object) -> Iterator[object]:
    if isinstance(connector, MultiConnector):
        for one in connector._connectors:
            yield from _connectors(one)
    else:
        yield connector
