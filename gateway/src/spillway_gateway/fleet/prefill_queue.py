"""Prompts that were sent to an engine and have no first byte yet, in the order in which they were sent.

A prompt is counted until its first byte. One of ten thousand tokens that is nearly computed would look like a queue of
ten thousand, and the next turn of a conversation would leave the engine that holds it. So what the oldest prompt has
computed by now, at the engine's rate, does not count any more; of the others none counts as begun.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class ColdPrompt(NamedTuple):
    """One that takes its engine long. first_block: its key. found_tokens: those before the ones that it computes."""

    first_block: int
    found_tokens: int


class PrefillQueue:
    """One engine's. On the event loop only. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._prompts: dict[object, int] = {}  # uncached tokens by request, oldest first
        self._cold: dict[object, ColdPrompt] = {}
        self._found: dict[int, dict[object, int]] = {}  # by first block: their found tokens by request, oldest first
        self._begun_at = 0.0  # when the oldest became the oldest
        self.tokens = 0
        self.cold_tokens = 0  # of those that are cold (cold_prompts.py)

    def add(self, request: object, tokens: int, cold: ColdPrompt | None = None) -> None:
        """A prompt with this number of uncached tokens was sent. Each request once."""
        if not self._prompts:
            self._begun_at = self._clock()
        self._prompts[request] = tokens
        self.tokens += tokens
        if cold is not None:
            self._cold[request] = cold
            self._found.setdefault(cold.first_block, {})[request] = cold.found_tokens
            self.cold_tokens += tokens

    def remove(self, request: object) -> None:
        """Remove a request whose first byte came, or which has ended."""
        tokens = self._prompts.pop(request, None)
        if tokens is not None:
            self.tokens -= tokens
            cold = self._cold.pop(request, None)
            if cold is not None:
                burst = self._found[cold.first_block]
                del burst[request]
                if not burst:
                    del self._found[cold.first_block]
                self.cold_tokens -= tokens
            self._begun_at = self._clock()

    def tokens_left(self, now: float, tokens_per_second: float) -> int:
        """Estimate the tokens that are left to compute, at the engine's rate."""
        if not self._prompts:
            return 0
        oldest = next(iter(self._prompts.values()))
        return self.tokens - min(oldest, int((now - self._begun_at) * tokens_per_second))

    def computes_from(self, first_block: int) -> int | None:
        """Return the token from which on the oldest cold prompt that begins with this block is computed; None if there
        is none."""
        burst = self._found.get(first_block)
        return None if burst is None else next(iter(burst.values()))
