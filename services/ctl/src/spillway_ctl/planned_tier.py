"""The sizes of prompts in the tiers, by the KV groups of the model that the chart rendered. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spillway_connector.plan.kv_groups import KvGroup, held_tokens, read_chunks, stored_chunks


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """groups: with the number of each. row_bytes: the bytes of a chunk of any group. every_window: whether
    windowChunks is all. drafts: whether the engine speculates."""

    groups: tuple[tuple[int, KvGroup], ...]
    row_bytes: int
    rows: int  # of a pod's CPU tier
    every_window: bool
    drafts: bool = False

    @classmethod
    def of(cls, memory: Mapping[str, Any], offload: Mapping[str, Any]) -> PlannedTier:
        """memory: The chart's figures of a pod. offload: That section of the engine service's configuration."""
        chunk_tokens, table = int(memory["chunkTokens"]), memory.get("groups", [[1, 0]])
        # Blocks of several sizes: a chunk has as many of each.
        per_chunk = chunk_tokens // max((block for _, _, *blocks in table for block in blocks), default=chunk_tokens)
        groups = tuple(
            (number, KvGroup(blocks[0] * per_chunk if blocks else chunk_tokens, max(0, window), window < 0))
            for number, window, *blocks in table
            if number
        )
        every = offload.get("windowChunks") == "all"
        return cls(groups, int(memory["cpuRowBytes"]), int(memory["cpuChunks"]), every, "draftLayers" in memory)

    @property
    def number_of_groups(self) -> int:
        return len(self._each)

    @property
    def _each(self) -> list[KvGroup]:
        return [group for count, group in self.groups for _ in range(count)]

    def stored_chunks(self, tokens: int) -> int:
        """Rows of the CPU tier, or frames of a shared tier, that a prompt takes."""
        return sum(stored_chunks(self._each, tokens, every_window=self.every_window, drafts=self.drafts))

    def read_chunks(self, tokens: int) -> int:
        """Return how many of the prompt's chunks a load reads."""
        return sum(read_chunks(self._each, tokens))

    def read_bytes_per_token(self, tokens: int) -> float:
        return self.read_chunks(tokens) * self.row_bytes / max(1, tokens)

    def stored_bytes_per_token(self, tokens: int) -> float:
        return self.stored_chunks(tokens) * self.row_bytes / tokens

    def held_tokens(self, prompt_tokens: int, rows: int | None = None) -> int:
        """Tokens that the rows hold in prompts of this length. rows: None: those of a pod's CPU tier."""
        rows = self.rows if rows is None else rows
        return held_tokens(self._each, rows, prompt_tokens, every_window=self.every_window, drafts=self.drafts)

    def describe_groups(self) -> str:
        """The groups and the rule for windows, e.g. `1 of full attention, 6 with a window of 1,024 tokens`."""
        numbers = Counter[str]()
        for count, group in self.groups:
            window = f"with a window of {group.window_tokens:,} tokens" if group.window_tokens else "of full attention"
            numbers["of states" if group.has_states else window] += count
        rule = f"; windowChunks: {'all' if self.every_window else 'last'}"
        has_windows = any(group.window_tokens for _, group in self.groups)
        return ", ".join(f"{count} {kind}" for kind, count in numbers.items()) + (rule if has_windows else "")
