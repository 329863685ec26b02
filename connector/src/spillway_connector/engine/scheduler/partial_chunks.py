"""Leaves out of a store what vLLM would misplace: parts of chunks of several blocks, of which a KV group has lost some.

A group with a window gives blocks up once no token reads them, and a group with states has blocks for some tokens
alone. vLLM's scheduler half leaves such blocks out of a store and names the place of the first one it has in its row;
the others follow one after another. So the bytes lie in their places only if no block is missing behind the first one.
And vLLM takes a chunk for stored if its last block is, although a load may read several at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

from spillway_connector.engine.features.window_stores import LEFT_OUT
from spillway_connector.engine.requests.state import RequestFields

LookUp = Callable[[RequestFields, int | None], int | None]


class PartialChunks:
    """Leaves blocks out that would lie in other places than theirs. Used on the scheduler's thread.

    Args:
        read_blocks: By KV group, how many blocks at the end of a chunk a load reads at most; 0: all, none is missing.
        chunks_looked_back: By KV group, how many chunks vLLM looks at again when a request ends.
        blocks_per_chunk: Blocks of a chunk.
    """

    def __init__(self, read_blocks: Sequence[int], chunks_looked_back: Sequence[int], blocks_per_chunk: int) -> None:
        self._groups = [(group, read) for group, read in enumerate(read_blocks) if read]
        self._looked_back = chunks_looked_back
        self._per_chunk = blocks_per_chunk

    @classmethod
    def of(
        cls, specs: Sequence[KVCacheSpec], chunk_tokens: Sequence[int], blocks_per_chunk: int
    ) -> PartialChunks | None:
        """Make it for these KV groups; None if none of them has chunks of which a part can be missing."""
        read = [_read_blocks(spec, blocks_per_chunk) for spec in specs]
        if blocks_per_chunk == 1 or not any(read):
            return None
        return cls(read, [-(-max(chunk_tokens) // tokens) for tokens in chunk_tokens], blocks_per_chunk)

    def leave_out(self, state_of: Callable[[str], RequestFields | None], step: SchedulerOutput) -> None:
        """Leave blocks and chunks out, before vLLM's scheduler half chooses what a step stores.

        vLLM 0.30 and later store for requests that have ended, too.
        """
        for request_id in (*step.num_scheduled_tokens, *step.finished_req_ids):
            if (request := state_of(request_id)) is not None:
                for group, read in self._groups:
                    state = request.group_states[group]
                    first = max(0, request.next_stored_chunk(state) - self._looked_back[group])
                    self._leave_out(state.block_ids, first, read)

    def _leave_out(self, blocks: list[int], first_chunk: int, read: int) -> None:
        per_chunk, begins_job = self._per_chunk, False
        for chunk in reversed(range(first_chunk, len(blocks) // per_chunk)):
            place = slice(chunk * per_chunk, (chunk + 1) * per_chunk)
            in_chunk = blocks[place]
            if in_chunk[-1] == LEFT_OUT:
                continue  # nothing of it is stored
            whole = in_chunk[::-1].index(LEFT_OUT) if LEFT_OUT in in_chunk else per_chunk  # at its end
            if begins_job or whole < read:
                blocks[place] = [LEFT_OUT] * per_chunk
            elif whole < per_chunk:
                blocks[place] = [LEFT_OUT] * (per_chunk - whole) + in_chunk[-whole:]
                begins_job = True  # a chunk in front of it would shift its blocks


def _read_blocks(spec: KVCacheSpec, blocks_per_chunk: int) -> int:
    if isinstance(spec, FullAttentionSpec):
        return 0
    if isinstance(spec, MambaSpec):
        return 1
    if not isinstance(spec, SlidingWindowSpec):
        return blocks_per_chunk  # chunked local attention (Llama 4) loses those of earlier chunks
    kept_tokens = spec.sliding_window + int(getattr(spec, "extra_retained_tokens", 0))
    return min(blocks_per_chunk, -(-kept_tokens // spec.block_size))


def load_unit_tokens(specs: Sequence[KVCacheSpec], chunk_tokens: Sequence[int]) -> int:
    """Every load ends at a multiple of this number of tokens; 1 if no KV group can lack blocks of a chunk."""
    return 1 if all(isinstance(spec, FullAttentionSpec) for spec in specs) else math.lcm(*chunk_tokens)


def whole_chunks(look_up: LookUp, request: RequestFields, tokens_max: int | None, unit_tokens: int) -> int | None:
    """The tokens that vLLM's search over several KV groups finds, up to the end of a chunk of every group.

    A group with small chunks can end the search within a larger chunk of another one, of which the bytes are there up
    to the chunk's end alone: a state is that of its end. A whole prompt is found but for its last token, which vLLM
    computes. vLLM 0.32 stores the end of a prompt within a chunk by itself, under a key of its own.

    Args:
        look_up: The search; takes the request, and how many tokens, of which it leaves the last one out, it may find.
        request: With the tokens that are computed already.
        tokens_max: As of `look_up`.
        unit_tokens: See `load_unit_tokens`.
    """
    computed, total = request.num_locally_computed_tokens, request.req.num_tokens
    tokens = look_up(request, tokens_max)
    while tokens and (over := (computed + tokens) % unit_tokens):
        but_one = over == unit_tokens - 1 and computed + tokens == total - 1
        if but_one or getattr(request, "partial_tail_boundary", None) is not None:
            break
        bound = tokens - over + 1
        tokens = look_up(request, bound) if bound > 1 else 0
    return tokens
