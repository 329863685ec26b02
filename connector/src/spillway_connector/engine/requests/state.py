"""The scheduler half's state of one request: its chunk keys, its LoRA adapter and the last lookup's answer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import concat
from typing import Any, NamedTuple, cast

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.v1.kv_offload.base import OffloadKey, make_offload_key

from spillway_connector.engine.namespace.adapters import AdapterInstance, FirstLoad
from spillway_connector.plan.prefix_memo import PrefixAnswer


class TierState(NamedTuple):
    """The state of the shared tier on which an answer rests."""

    passes: bool  # loading beats recomputing, or this request probes the tier
    open: bool  # the tier accepts lookups


Prefix = PrefixAnswer[OffloadKey, TierState]


class RequestFields(RequestOffloadState):
    """vLLM's state of a request, with keys that carry the adapter's identity.

    vLLM derives a chunk's key from its block hash alone, in a loop over all blocks; this class appends only the
    new keys, and the keys of a LoRA request end with the digest of the adapter's files. Scheduler thread.
    """

    arrived_at = float("-inf")  # seconds of the queue order's clock
    touched_at = float("-inf")  # time.monotonic seconds
    counted_keys: Sequence[int] | None = None  # of each KV group, by manager.count_request
    prefix: Prefix | None = None  # the last answer, of models with one KV group
    max_load_tokens: int | None = None  # of the request, if this vLLM has such a bound
    has_adapter = False  # LoRA
    adapter: AdapterInstance | None = None
    identified = True  # the adapter's digest is known, and the keys are complete
    is_stale = False  # it may hold or hit KV of weights that are gone
    is_unsound = False  # vLLM may compute its KV wrongly
    window_ends: tuple[int, ...] | None = None  # tokens, see features/window_stores.py; None before its first step
    _offload_tokens_max: int | None = None
    _known_counts = (-1, -1)  # hashes of blocks and keys of chunks when the keys were last complete
    _first_load: FirstLoad | None = None

    @property
    def max_offload_tokens(self) -> int | None:
        """The tokens of the request that may be stored; None: no limit. Nothing is stored if its adapter's digest is
        unknown or its KV was computed with other weights than its key's."""
        return self._offload_tokens_max if self.identified and not (self.is_stale or self.is_unsound) else 0

    @max_offload_tokens.setter
    def max_offload_tokens(self, tokens: int | None) -> None:
        self._offload_tokens_max = tokens

    def chunk_hashes(self) -> Sequence[bytes]:
        """Hashes of the request's blocks that are equal on all engines with these adapter weights, reloaded or not."""
        if self.adapter is None or not self.adapter.number:
            return cast(Sequence[bytes], self.req.block_hashes)
        if self._first_load is None:
            self._first_load = FirstLoad(self.req)
        self._first_load.update_block_hashes()
        return self._first_load.block_hashes

    def lacks_only_last_chunk(self, chunk_tokens: int) -> bool:
        """Whether the device lacks only the prompt's last chunk: to load it costs a step, and often a wait."""
        computed = self.num_locally_computed_tokens
        return bool(computed > 0 and self.req.num_tokens - computed <= chunk_tokens)

    @abstractmethod
    def _hashes_per_chunk(self, group_config: Any) -> int: ...

    @abstractmethod
    def first_own_chunk(self, group_state: Any) -> int:
        """The first chunk of a KV group that the request neither found nor has stored."""

    @abstractmethod
    def next_stored_chunk(self, group_state: Any) -> int:
        """The first chunk of a KV group that vLLM may still store, also of what its prefix cache has found."""

    @override
    def update_offload_keys(self) -> None:
        """vLLM's contract: append the keys of blocks whose hashes are new."""
        adapter_key = b""
        if not self.has_adapter:
            if (len(self.req.block_hashes), len(self.group_states[0].offload_keys)) == self._known_counts:
                return  # in most steps of a request that decodes
        else:
            key = None if self.adapter is None else self.adapter.key
            self.identified = key is not None
            if key is None:
                return
            adapter_key = key
        hashes = self.chunk_hashes()
        for config, state in zip(self.config.kv_group_configs, self.group_states, strict=True):
            factor = self._hashes_per_chunk(config)
            begin = factor * len(state.offload_keys) + factor - 1
            if begin < len(hashes):
                group = make_offload_key(adapter_key, config.group_idx)
                wanted = hashes[begin::factor] if begin or factor > 1 else hashes
                state.offload_keys += cast(Iterable[OffloadKey], map(concat, wanted, repeat(group)))
        self._known_counts = len(self.req.block_hashes), len(self.group_states[0].offload_keys)
