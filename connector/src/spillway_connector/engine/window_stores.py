"""Which chunks of a sliding window are stored: those that a prefix can end with.

A load brings of full attention every chunk of the prefix, and of a window its last ones alone. A prefix ends where a
prompt ends (it comes again, or its conversation goes on), in the answer behind it, at a mark up to which a client
retains it or lets it be stored, or where another prompt parts from it. All but the last are known when the prompt is
computed. The last is known when that other prompt comes: it finds the chunks of full attention up to there, and no
window. It then computes these tokens, and stores the window that ends there for the next one. So of the chunks of a
window amid a prompt, which are as many as those of full attention, only those are stored with which a prefix has ended.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import OffloadKey

from spillway_connector.engine.request_state import RequestFields
from spillway_connector.engine.tenancy import TenantContext
from spillway_connector.engine.tiering import TieringManager

_LEFT_OUT = 0  # vLLM's scheduler half does not store a block with this id


@dataclass(frozen=True, slots=True)
class _Window:
    """A KV group. chunks: at most so many before the end of a prefix are read."""

    group: int
    chunk_tokens: int
    chunks: int


class WindowStores:
    """For models of windows beside full attention. Scheduler thread."""

    def __init__(
        self, windows: Sequence[_Window], whole_group: int, whole_chunk_tokens: int, blocks_per_chunk: int
    ) -> None:
        self._windows = windows
        self._whole_group = whole_group
        self._whole_chunk_tokens = whole_chunk_tokens
        self._blocks_per_chunk = blocks_per_chunk

    @classmethod
    def of(
        cls, specs: Sequence[KVCacheSpec], chunk_tokens: Sequence[int], blocks_per_chunk: int
    ) -> WindowStores | None:
        """Make it for these KV groups.

        Returns:
            None if every chunk is stored: without full attention nothing shows where prompts part, and recurrent states
            are there for a few ends of prefixes alone.
        """
        windows: list[_Window] = []
        whole: list[int] = []
        for group, (spec, tokens) in enumerate(zip(specs, chunk_tokens, strict=True)):
            if isinstance(spec, SlidingWindowSpec):
                # vLLM 0.32 keeps a few tokens more for drafts of several modules. One chunk more than that is read for
                # a draft's layers, and if a prefix ends within a chunk.
                kept_tokens = spec.sliding_window + int(getattr(spec, "extra_retained_tokens", 0))
                windows.append(_Window(group, tokens, -(-kept_tokens // tokens) + 1))
            elif isinstance(spec, FullAttentionSpec):
                whole.append(group)
            else:
                return None
        if not windows or not whole:
            return None
        coarsest = max(whole, key=lambda group: chunk_tokens[group])
        return cls(windows, coarsest, chunk_tokens[coarsest], blocks_per_chunk)

    def leave_out(self, requests: Iterable[RequestFields | None], manager: TieringManager) -> None:
        """Before vLLM's scheduler half chooses what a step's requests store: leave out what no prefix ends with."""
        resident = manager.primary_tier.resident
        for request in requests:
            if request is not None:
                self._leave_out(request, resident)

    def _leave_out(self, request: RequestFields, resident: Container[OffloadKey]) -> None:
        whole_tokens, per_chunk = self._whole_chunk_tokens, self._blocks_per_chunk
        if request.window_ends is None:
            keys = request.group_states[self._whole_group].offload_keys
            found = next((index for index, key in enumerate(keys) if key not in resident), len(keys))
            request.window_ends = (found * whole_tokens, *_marks(request))
        # At least the prompt's last token is computed when it comes again.
        end_tokens = (request.req.num_prompt_tokens - 1) // whole_tokens * whole_tokens
        for window in self._windows:
            state = request.group_states[window.group]
            last = end_tokens // window.chunk_tokens - window.chunks
            ends = [end // whole_tokens * whole_tokens // window.chunk_tokens for end in request.window_ends]
            blocks = state.block_ids
            for chunk in range(request.first_own_chunk(state), min(last, len(blocks) // per_chunk)):
                if not any(end - window.chunks <= chunk < end for end in ends):
                    blocks[chunk * per_chunk : (chunk + 1) * per_chunk] = [_LEFT_OUT] * per_chunk


def _marks(request: RequestFields) -> Iterable[int]:
    """Tokens up to which the request's client retains its prompt, or lets it be stored."""
    if (bound := request.max_offload_tokens) is not None:
        yield bound
    context = request.req_context
    retention = context.retention if isinstance(context, TenantContext) else None
    if retention is not None:
        yield from (tokens for tokens, _ in retention.marks if tokens is not None)
