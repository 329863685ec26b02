"""Numbers of chunks of each KV group: those that a prompt takes in a tier, and those that a load reads. Pure.

vLLM puts layers into KV groups that have blocks of their own, and a tier stores each block of a group by itself, in a
row as large as the largest group's. A group has full attention, a sliding window or recurrent states:

- of full attention every chunk is stored, and a load reads all of them;
- of a window a load reads the last chunks, and of states the last one. With `windowChunks: last` the tier stores only
  those before the end of a prompt. A state cannot be rewound by the one token that vLLM computes at least, and for a
  drafter it computes the last chunk. So if a prompt ends with a chunk, and the model has states or speculates, those
  before its last chunk are stored as well: it goes on behind that chunk, but is found again without it;
- with `windowChunks: all` the tier stores every chunk of a window, and the state of each step of a prefill.

Sizes of tiers, `spillway plan` and benchmarks count by this module; what an engine stores is chosen by
`engine/features/window_stores.py`, which takes the ends of prefixes and windows from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STEP_TOKENS = 8192  # of a step of a prefill: what vLLM computes at once on accelerators by default


def last_end_tokens(prompt_tokens: int, whole_chunk_tokens: int, *, rewinds: bool) -> int:
    """The longest prefix of a prompt that can be loaded when the prompt is sent again: prefixes end with a chunk of
    full attention, and vLLM computes at least the last token. rewinds: whether it does so behind a load of the whole
    prompt, as attention can."""
    return (prompt_tokens - (not rewinds)) // whole_chunk_tokens * whole_chunk_tokens


def chunks_before_end(window_tokens: int, chunk_tokens: int) -> int:
    """Return how many chunks of a window are read at most for a prefix: one more than the window has is read for a
    draft's layers, and if a prefix ends within a chunk."""
    return -(-window_tokens // chunk_tokens) + 1


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose blocks are stored together.

    Args:
        chunk_tokens: Tokens of a chunk.
        window_tokens: Tokens of the sliding window; 0: there is none.
        has_states: Whether the layers keep recurrent states in place of each token's KV.
    """

    chunk_tokens: int
    window_tokens: int = 0
    has_states: bool = False

    def stored(self, tokens: int, whole_chunk_tokens: int, *, every_window: bool, rewinds: bool) -> int:
        """Count those of a prompt.

        Args:
            tokens: Tokens of the prompt. Only whole chunks of full attention count.
            whole_chunk_tokens: Tokens of a chunk of full attention.
            every_window: `windowChunks: all`.
            rewinds: As of `last_end_tokens`.
        """
        wholes = tokens // whole_chunk_tokens
        more_ends = wholes - last_end_tokens(tokens, whole_chunk_tokens, rewinds=rewinds) // whole_chunk_tokens
        if self.has_states:
            every = -(-wholes * whole_chunk_tokens // max(STEP_TOKENS, self.chunk_tokens))
            return every if every_window else min(every, 1 + more_ends)
        in_whole = whole_chunk_tokens // self.chunk_tokens
        if not self.window_tokens:
            return wholes * in_whole
        # vLLM leaves out what lies within a chunk of full attention, except for the window before its end.
        window = -(-self.window_tokens // self.chunk_tokens)
        kept = min(window, in_whole)
        every = wholes * kept
        if every_window:
            return every
        before_end = window if window < in_whole else chunks_before_end(self.window_tokens, self.chunk_tokens)
        return min(every, kept * more_ends + before_end)

    def read(self, tokens: int, whole_chunk_tokens: int) -> int:
        """Count those that a load of the prompt reads."""
        chunks = tokens // whole_chunk_tokens * (whole_chunk_tokens // self.chunk_tokens)
        if self.has_states:
            return min(chunks, 1)
        return min(chunks, -(-self.window_tokens // self.chunk_tokens)) if self.window_tokens else chunks


def whole_chunk_tokens(groups: Sequence[KvGroup]) -> int:
    return max(group.chunk_tokens for group in groups)


def stored_chunks(groups: Sequence[KvGroup], tokens: int, *, every_window: bool, drafts: bool = False) -> list[int]:
    """Chunks of each group that a prompt takes in a tier; each takes a row of the CPU tier.

    drafts: Whether the engine speculates.
    """
    whole = whole_chunk_tokens(groups)
    # Without full attention nothing shows where prompts part.
    every_window |= all(group.window_tokens or group.has_states for group in groups)
    rewinds = not drafts and not any(group.has_states for group in groups)
    return [group.stored(tokens, whole, every_window=every_window, rewinds=rewinds) for group in groups]


def read_chunks(groups: Sequence[KvGroup], tokens: int) -> list[int]:
    """Chunks of each group that a load of the prompt reads."""
    whole = whole_chunk_tokens(groups)
    return [group.read(tokens, whole) for group in groups]


def whole_groups(groups: Sequence[KvGroup]) -> int:
    """Number of groups that each further token of a prompt adds to a load: of windows and states it reads the last
    ones."""
    return sum(not group.window_tokens and not group.has_states for group in groups) or len(groups)


def held_tokens(
    groups: Sequence[KvGroup], rows: int, prompt_tokens: int, *, every_window: bool, drafts: bool = False
) -> int:
    """The tokens that this number of rows holds in prompts of this length, in whole chunks of full attention."""
    whole = whole_chunk_tokens(groups)
    tokens = -(-prompt_tokens // whole) * whole
    stored = sum(stored_chunks(groups, tokens, every_window=every_window, drafts=drafts))
    return rows * tokens // stored // whole * whole
