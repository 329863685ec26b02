"""The blocks that the index expects of an engine to which a prompt was sent."""

from __future__ import annotations

from collections.abc import Sequence

from spillway_gateway.fleet.expected_blocks import Expected
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.fleet.steps import Steps
from spillway_gateway.routing.prefix import RUN_BLOCKS


class RoutedBlocks:
    """The blocks of a prompt that was sent to an engine. Until the engine accepts it they count as held there, but
    nothing makes way for them: what is in a prompt is the client's choice."""

    __slots__ = ("_engine_name", "_expected", "_held_seconds", "_index", "_keys", "_steps")

    def __init__(
        self, index: PrefixIndex, steps: Steps, engine_name: str, keys: Sequence[int], *, held_seconds: float | None
    ) -> None:
        """held_seconds: the time after which blocks of an engine without events count as gone."""
        self._index = index
        self._steps = steps
        self._engine_name = engine_name
        self._keys = keys
        self._held_seconds = held_seconds
        self._expected: tuple[Expected, ...] = ()

    def expect(self, until: float, on_device: int | None) -> None:
        """Count them as held. until: monotonic seconds. on_device: as PrefixIndex.expect."""
        self._expected = self._index.expect(self._engine_name, self._keys, until, on_device=on_device)

    def accepted(self, now: float) -> None:
        """now: monotonic seconds."""
        until = now + self._held_seconds if self._held_seconds is not None else None
        use = self._index.accepted(self._engine_name, self._keys, until, self._expected)
        if len(self._keys) < RUN_BLOCKS:  # this takes less than a turn of the event loop
            self._steps.run(use)
        else:
            self._steps.soon(use)

    def withdraw(self) -> None:
        """The engine did not accept it, or the request ended before it answered."""
        self._index.withdraw(self._expected)
