"""Choice of the chunks of sliding windows and recurrent states that are stored: those that a prefix can end with.

To load a prefix, vLLM needs every chunk of full attention, only the last chunks of each window, and one state. So a
chunk in the middle of a prompt, of which a window has as many as full attention, is read only if a prefix ends soon
after it. Prefixes end

- at the end of a prompt, which is sent again or continued by its conversation;
- in the answer to it;
- at a mark up to which the client retains the prompt or allows it to be stored;
- at the point where a later prompt differs from an earlier one.

The first three are known when the prompt is computed. The fourth is known when the later prompt arrives: the tier has
the chunks of full attention up to that point, but not those of the window. That prompt is computed, and its window at
that point is stored for the prompts that follow.

vLLM keeps a state at the end of a prompt, in its answer, and at the end of each step of a prefill. Before a point
amid a prompt, the last step that ended there counts.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import OffloadKey

from spillway_connector.engine.manager.tiering import TieringManager
from spillway_connector.engine.requests.state import RequestFields
from spillway_connector.engine.requests.tenancy import TenantContext
from spillway_connector.plan.kv_groups import chunks_before_end, last_end_tokens

LEFT_OUT = 0  # vLLM's scheduler half does not store a block with this id


def group_names(indices: Sequence[int], specs: Sequence[KVCacheSpec]) -> dict[int, str]:
    """The names of KV groups in metrics, by index; empty if there is only one group."""
    if len(specs) == 1:
        return {}
    return {index: f"{index}-{_kind(spec)}" for index, spec in zip(indices, specs, strict=True)}


def _kind(spec: KVCacheSpec) -> str:
    if isinstance(spec, MambaSpec):
        return "states"
    return "window" if isinstance(spec, SlidingWindowSpec) else "full"


@dataclass(frozen=True, slots=True)
class Window:
    """A KV group with a sliding window, or with states.

    Args:
        group: Its index.
        chunk_tokens: Tokens of a chunk.
        chunks: The most chunks before the end of a prefix that are read.
        searched_chunks: The number of chunks that are kept before an end amid a prompt; with states it is large enough
            that one of them ends with a step.
    """

    group: int
    chunk_tokens: int
    chunks: int
    searched_chunks: int

    @classmethod
    def of(cls, spec: SlidingWindowSpec | MambaSpec, group: int, chunk_tokens: int, step_tokens: int) -> Window:
        """step_tokens: The most tokens of a prompt that a step computes."""
        if isinstance(spec, MambaSpec):
            chunks = chunks_before_end(chunk_tokens, chunk_tokens)
            in_step = -(-step_tokens // chunk_tokens) if spec.mamba_cache_mode == "align" else 0
            return cls(group, chunk_tokens, chunks, max(chunks, in_step))
        # vLLM 0.32 keeps a few tokens more for drafts of several modules.
        kept_tokens = spec.sliding_window + int(getattr(spec, "extra_retained_tokens", 0))
        chunks = chunks_before_end(kept_tokens, chunk_tokens)
        return cls(group, chunk_tokens, chunks, chunks)

    def first_chunk(self, end_tokens: int) -> int:
        """The first chunk that is read for a prefix of this length; below 0 if all chunks are read."""
        return end_tokens // self.chunk_tokens - self.chunks

    def is_stored(self, chunk: int, end_tokens: int, ends_amid: Iterable[int]) -> bool:
        """end_tokens: the end of the prompt. ends_amid: the ends within it, in chunks."""
        if chunk >= self.first_chunk(end_tokens):
            return True
        return any(end - self.searched_chunks <= chunk < end for end in ends_amid)


class WindowStores:
    """Chooses the chunks for models that have windows or states beside full attention. Used on the scheduler's
    thread."""

    def __init__(
        self,
        windows: Sequence[Window],
        whole_group: int,
        whole_chunk_tokens: int,
        blocks_per_chunk: int,
        *,
        rewinds: bool,
    ) -> None:
        self._windows = windows
        self._rewinds = rewinds
        self._whole_group = whole_group
        self._whole_chunk_tokens = whole_chunk_tokens
        self._blocks_per_chunk = blocks_per_chunk

    @classmethod
    def of(
        cls,
        specs: Sequence[KVCacheSpec],
        chunk_tokens: Sequence[int],
        blocks_per_chunk: int,
        step_tokens: int,
        *,
        drafts: bool,
    ) -> WindowStores | None:
        """Make it for these KV groups.

        Args:
            specs: The specs of the KV groups.
            chunk_tokens: The tokens of a chunk of each group.
            blocks_per_chunk: Blocks of a chunk.
            step_tokens: What a step computes of a prompt at most.
            drafts: Whether the engine speculates: vLLM computes the last chunk of a prompt for a draft's layers.

        Returns:
            None if every chunk is stored. Without full attention, nothing shows at which point prompts differ.
        """
        windows: list[Window] = []
        whole: list[int] = []
        for group, (spec, tokens) in enumerate(zip(specs, chunk_tokens, strict=True)):
            if isinstance(spec, SlidingWindowSpec | MambaSpec):
                windows.append(Window.of(spec, group, tokens, step_tokens))
            elif isinstance(spec, FullAttentionSpec):
                whole.append(group)
            else:
                return None
        if not windows or not whole:
            return None
        coarsest = max(whole, key=lambda group: chunk_tokens[group])
        rewinds = not drafts and not any(isinstance(spec, MambaSpec) for spec in specs)
        return cls(windows, coarsest, chunk_tokens[coarsest], blocks_per_chunk, rewinds=rewinds)

    def leave_out(self, requests: Iterable[RequestFields | None], manager: TieringManager) -> None:
        """Leave out the chunks that no prefix ends with, before vLLM's scheduler half chooses what a step stores."""
        resident = manager.primary_tier.resident
        for request in requests:
            if request is not None:
                self._leave_out(request, resident)

    def keeps_state(self, request: RequestFields, group: int, tokens: int) -> bool:
        """Whether the state after this number of tokens is stored; vLLM 0.32 hands these states over by itself. group:
        its index."""
        window = next(window for window in self._windows if window.group == group)
        if request.window_ends is None or tokens % window.chunk_tokens:  # the state of a prompt's end within a chunk
            return True
        return window.is_stored(
            tokens // window.chunk_tokens - 1, self._last_end(request), self._ends_amid(request, window)
        )

    def _last_end(self, request: RequestFields) -> int:
        """Return the end, in tokens, from which on everything is stored."""
        return last_end_tokens(request.req.num_prompt_tokens, self._whole_chunk_tokens, rewinds=self._rewinds)

    def _ends_amid(self, request: RequestFields, window: Window) -> list[int]:
        """Convert the ends of the request's windows into chunks of the window."""
        whole_tokens = self._whole_chunk_tokens
        return [end // whole_tokens * whole_tokens // window.chunk_tokens for end in request.window_ends or ()]

    def _leave_out(self, request: RequestFields, resident: Container[OffloadKey]) -> None:
        whole_tokens, per_chunk = self._whole_chunk_tokens, self._blocks_per_chunk
        if request.window_ends is None:
            keys = request.group_states[self._whole_group].offload_keys
            found = next((index for index, key in enumerate(keys) if key not in resident), len(keys))
            request.window_ends = (found * whole_tokens, *_ends(request))
            if not self._rewinds and request.req.num_prompt_tokens % whole_tokens == 0:
                # The last state is that of the whole prompt, which is found without its last chunk when it comes again.
                request.window_ends += (self._last_end(request),)
        end_tokens = self._last_end(request)
        for window in self._windows:
            state = request.group_states[window.group]
            last = window.first_chunk(end_tokens)
            ends = self._ends_amid(request, window)
            blocks = state.block_ids
            for chunk in range(request.first_own_chunk(state), min(last, len(blocks) // per_chunk)):
                if not window.is_stored(chunk, end_tokens, ends):
                    blocks[chunk * per_chunk : (chunk + 1) * per_chunk] = [LEFT_OUT] * per_chunk


def _ends(request: RequestFields) -> Iterable[int]:
    """The numbers of tokens at which a prefix can end amid a prompt, for reasons that the prompt or its client has."""
    if (bound := request.max_offload_tokens) is not None:
        yield bound
    context = request.req_context
    retention = context.retention if isinstance(context, TenantContext) else None
    if retention is not None:
        yield from (tokens for tokens, _ in retention.marks if tokens is not None)
    # vLLM 0.32 ends a step where the device shows that prompts part.
    yield getattr(request.req, "shared_prefix_boundary", 0)
