"""Which chunks of a sliding window are stored: those that a prefix can end with.

To load a prefix, vLLM needs every chunk of full attention and only the last chunks of each window. So a chunk in the
middle of a prompt, of which a window has as many as full attention, is read only if a prefix ends soon after it.
Prefixes end

- at the end of a prompt, which is sent again or continued by its conversation;
- in the answer to it;
- at a mark up to which the client retains the prompt or allows it to be stored;
- at the point where a later prompt differs from an earlier one.

The first three are known when the prompt is computed. The fourth is known when the later prompt arrives: the tier has
the chunks of full attention up to that point, but not those of the window. That prompt is computed, and its window at
that point is stored for the prompts that follow.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import OffloadKey

from spillway_connector.engine.manager.tiering import TieringManager
from spillway_connector.engine.requests.state import RequestFields
from spillway_connector.engine.requests.tenancy import TenantContext
from spillway_connector.plan.kv_groups import chunks_before_end, last_end_tokens

_LEFT_OUT = 0  # vLLM's scheduler half does not store a block with this id


@dataclass(frozen=True, slots=True)
class Window:
    """A KV group with a sliding window.

    Args:
        group: Its index.
        chunk_tokens: Tokens of a chunk.
        chunks: How many chunks before the end of a prefix are read at most.
    """

    group: int
    chunk_tokens: int
    chunks: int

    @classmethod
    def of(cls, spec: SlidingWindowSpec, group: int, chunk_tokens: int) -> Window:
        # vLLM 0.32 keeps a few tokens more for drafts of several modules.
        kept_tokens = spec.sliding_window + int(getattr(spec, "extra_retained_tokens", 0))
        return cls(group, chunk_tokens, chunks_before_end(kept_tokens, chunk_tokens))

    def first_chunk(self, end_tokens: int) -> int:
        """The first chunk that is read for a prefix of so many tokens; below 0 if all of them are."""
        return end_tokens // self.chunk_tokens - self.chunks


class WindowStores:
    """Chooses the chunks for models that have windows and full attention. Used on the scheduler's thread."""

    def __init__(
        self, windows: Sequence[Window], whole_group: int, whole_chunk_tokens: int, blocks_per_chunk: int
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
            None if every chunk is stored. Without full attention, nothing shows at which point prompts differ; with
            recurrent states, vLLM keeps states for only a few ends of prefixes.
        """
        windows: list[Window] = []
        whole: list[int] = []
        for group, (spec, tokens) in enumerate(zip(specs, chunk_tokens, strict=True)):
            if isinstance(spec, SlidingWindowSpec):
                windows.append(Window.of(spec, group, tokens))
            elif isinstance(spec, FullAttentionSpec):
                whole.append(group)
            else:
                return None
        if not windows or not whole:
            return None
        coarsest = max(whole, key=lambda group: chunk_tokens[group])
        return cls(windows, coarsest, chunk_tokens[coarsest], blocks_per_chunk)

    def leave_out(self, requests: Iterable[RequestFields | None], manager: TieringManager) -> None:
        """Leave out the chunks that no prefix ends with, before vLLM's scheduler half chooses what a step stores."""
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
        end_tokens = last_end_tokens(request.req.num_prompt_tokens, whole_tokens)
        for window in self._windows:
            state = request.group_states[window.group]
            last = window.first_chunk(end_tokens)
            ends = [end // whole_tokens * whole_tokens // window.chunk_tokens for end in request.window_ends]
            blocks = state.block_ids
            for chunk in range(request.first_own_chunk(state), min(last, len(blocks) // per_chunk)):
                if not any(end - window.chunks <= chunk < end for end in ends):
                    blocks[chunk * per_chunk : (chunk + 1) * per_chunk] = [_LEFT_OUT] * per_chunk


def _marks(request: RequestFields) -> Iterable[int]:
    """The numbers of tokens up to which the client retains its prompt or allows it to be stored."""
    if (bound := request.max_offload_tokens) is not None:
        yield bound
    context = request.req_context
    retention = context.retention if isinstance(context, TenantContext) else None
    if retention is not None:
        yield from (tokens for tokens, _ in retention.marks if tokens is not None)
