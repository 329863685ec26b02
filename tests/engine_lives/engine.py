"""An engine without a model: real scheduler, real connector, KV whose every byte is checked.

The KV of a token is an 8-byte digest of all tokens up to it. A request computes a token only after every earlier one
that its attention reads has been found in its blocks, byte for byte.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import xxhash
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from engine_lives.manual_copies import ManualCopier
from engine_lives.random_tier import RANDOM, RandomTier
from spillway_connector.device.copier import Direction
from spillway_connector.engine import connector_base
from spillway_connector.engine.features.fair_steps import FairSteps
from spillway_connector.engine.features.feature import feature_of
from spillway_connector.engine.features.queue_order import QueueOrder
from spillway_connector.engine.generation import Generation, generation
from spillway_connector.engine.scheduler.resets import blocks_in_use
from spillway_connector.engine.scheduler.waiting import WaitingRequests
from spillway_connector.engine.shared_tiers.prefix_tier import SharedTierBase
from spillway_connector.plan.load_cost import RateMeter
from spillway_connector.plan.meeting import MeetingOutcome
from spillway_connector.plan.step_shares import Party, Step, StepShares
from spillway_connector.plan.waiting import KEPT_SHARE_MAX

SINCE_0_30 = generation() is not Generation.V023
BLOCK_TOKENS = 32 if SINCE_0_30 else 16  # the smallest block of vLLM's CPU platform
TOKEN_BYTES = 8
LAYERS = 2  # a group
_NO_TOKEN = 0  # one that is never sampled
_WRONG_TOKEN = 511  # sampled from KV that is not what was computed; no request may keep it
_WRONG_DIGEST = 0xA5
# Of a real tier, on however slow a disk: what these schedules show is not that it is given up.
_PATIENT_LIMITS = {
    "lookup_timeout_seconds": 60.0,
    "load_timeout_seconds": 60.0,
    "store_timeout_seconds": 60.0,
    "store_queue_seconds_max": 60.0,
}
MAX_TOKENS = 12 * BLOCK_TOKENS
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "torch_dtype": "float32",
}


STATES = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """windows: tokens a group's attention reads, None for all of them, STATES if it has recurrent states; one group
    each."""

    windows: tuple[int | None, ...]
    device_blocks: int
    cpu_rows: int
    blocks_per_chunk: int = 1
    shared_tier: bool = False  # a RandomTier behind the CPU tier
    nvme_tier: bool = False  # a real one, with its threads and files
    generated_tokens: str = "on"
    drafts: int = 0  # tokens of a draft that a step verifies; many are rejected
    asynchronous: bool = False  # the scheduler does not know the tokens of the step before
    layerwise: bool = False  # every load that a step can read itself goes layer by layer
    storing: str = "eager"  # auto, late: the CPU tier gets what the device gives up, once it is full
    meetings: bool = False  # what the shared tier holds is loaded from its end while the request is computed
    fair_steps: bool = False  # a session's flood is left out of others' steps
    refuses_recompute: bool = False  # as vllm-ascend does for models with states
    window_parts: int = 1  # so many blocks of a window have the tokens of one of full attention
    tokens_max: int = MAX_TOKENS  # of a request
    step_tokens: int = 6 * BLOCK_TOKENS
    requests_max: int = 6  # that run at once
    checks_bytes: bool = True  # and writes them; a load of many requests has no time for it

    def block_tokens(self, group: int) -> int:
        return BLOCK_TOKENS // self.window_parts if self.windows[group] else BLOCK_TOKENS


SHAPES = {
    "full": Shape((None,), device_blocks=22, cpu_rows=40),
    "chunks": Shape((None,), device_blocks=22, cpu_rows=20, blocks_per_chunk=2),
    "windows": Shape((None, 3 * BLOCK_TOKENS), device_blocks=40, cpu_rows=80),
    "windows-of-one-block": Shape((None, BLOCK_TOKENS), device_blocks=40, cpu_rows=80),
    "windows-of-two-sizes": Shape((None, BLOCK_TOKENS, 5 * BLOCK_TOKENS + 3), device_blocks=60, cpu_rows=90),
    "windows-chunks": Shape((None, 3 * BLOCK_TOKENS), device_blocks=40, cpu_rows=40, blocks_per_chunk=2),
    "windows-within-chunks": Shape(
        (None, BLOCK_TOKENS // 4, BLOCK_TOKENS // 2), device_blocks=90, cpu_rows=70, window_parts=4
    ),
    "windows-in-parts": Shape((None, 15, 2), device_blocks=96, cpu_rows=87, blocks_per_chunk=3, window_parts=2),
    "states-in-parts": Shape((None, STATES, MAX_TOKENS - 1), device_blocks=47, cpu_rows=114, blocks_per_chunk=3),
    "windows-shared": Shape((3 * BLOCK_TOKENS, None), device_blocks=40, cpu_rows=60, shared_tier=True),
    "states": Shape((None, STATES), device_blocks=40, cpu_rows=60, refuses_recompute=True),
    "states-shared": Shape((STATES, None), device_blocks=40, cpu_rows=40, shared_tier=True),
    "states-async": Shape((None, STATES, STATES), device_blocks=60, cpu_rows=60, asynchronous=True),
    "shared": Shape((None,), device_blocks=28, cpu_rows=24, shared_tier=True),
    "nvme": Shape((None,), device_blocks=28, cpu_rows=24, nvme_tier=True),
    "window-alone": Shape((2 * BLOCK_TOKENS + 5,), device_blocks=22, cpu_rows=40),
    "prompts": Shape((None,), device_blocks=22, cpu_rows=40, generated_tokens="off"),
    "drafts": Shape((None,), device_blocks=22, cpu_rows=40, drafts=3),
    "async": Shape((None,), device_blocks=22, cpu_rows=20, blocks_per_chunk=2, asynchronous=True),
    "async-drafts": Shape((None, 3 * BLOCK_TOKENS), device_blocks=40, cpu_rows=80, drafts=3, asynchronous=True),
    "exclusive": Shape((None,), device_blocks=28, cpu_rows=16, storing="auto"),
    "exclusive-async": Shape((None,), device_blocks=22, cpu_rows=20, storing="auto", drafts=3, asynchronous=True),
    "exclusive-shared": Shape((None,), device_blocks=22, cpu_rows=20, storing="late", shared_tier=True),
    "meetings": Shape((None,), device_blocks=28, cpu_rows=24, shared_tier=True, meetings=True),
    "meetings-async": Shape((None,), device_blocks=28, cpu_rows=24, shared_tier=True, asynchronous=True, meetings=True),
    "meetings-chunks": Shape(
        (None,), device_blocks=40, cpu_rows=12, blocks_per_chunk=2, shared_tier=True, meetings=True
    ),
    "fair": Shape((None,), device_blocks=22, cpu_rows=24, shared_tier=True, fair_steps=True),
    "fair-async": Shape((None,), device_blocks=22, cpu_rows=40, drafts=3, asynchronous=True, fair_steps=True),
    "fair-meetings": Shape((None,), device_blocks=28, cpu_rows=24, shared_tier=True, meetings=True, fair_steps=True),
    "layers": Shape((None,), device_blocks=22, cpu_rows=40, layerwise=True),
    "layers-chunks": Shape((None,), device_blocks=22, cpu_rows=20, blocks_per_chunk=2, layerwise=True),
    "layers-shared": Shape((None,), device_blocks=28, cpu_rows=24, shared_tier=True, layerwise=True),
    "layers-async": Shape((None,), device_blocks=22, cpu_rows=40, asynchronous=True, layerwise=True),
    "exclusive-layers": Shape(
        (None,), device_blocks=22, cpu_rows=16, storing="auto", asynchronous=True, layerwise=True
    ),
    "meetings-layers": Shape(
        (None,),
        device_blocks=28,
        cpu_rows=24,
        shared_tier=True,
        asynchronous=True,
        layerwise=True,
        meetings=True,
    ),
}
SHAPES["layers-hit"] = replace(SHAPES["layers-async"], device_blocks=40)  # for prompts that share a beginning
RANDOM_SHAPES = [name for name, shape in SHAPES.items() if not shape.nvme_tier]  # every byte moves at a random time


@dataclass
class _Row:
    """The worker's state of a running request."""

    blocks: list[list[int]]  # by group
    computed: int = 0  # tokens whose KV is final
    draft: list[int] = field(default_factory=list)  # of the tokens behind the last one
    believed: int = 0  # the most that the scheduler has ever taken for computed, drafts that were rejected included


@dataclass
class _Work:
    """The part of one request that a step computes."""

    row: _Row
    digests: list[int]  # of all its tokens; none if they are unknown
    written: list[int]  # digests of the tokens up to the last new one
    draft: list[int]
    real: int  # new tokens, without the draft
    tokens: int  # that it has


@dataclass
class Figures:
    steps: int = 0
    loaded_blocks: int = 0
    preemptions: int = 0
    failures: int = 0
    checked_tokens: int = 0
    accepted: int = 0
    rejected: int = 0
    early_loads: int = 0
    step_loads: int = 0
    steps_taken_back: int = 0
    resets: int = 0
    resets_refused: int = 0
    resets_forced: int = 0
    resets_of_all: int = 0  # which preempt what runs
    pauses: int = 0
    named: int = 0  # times that the weights changed and were named
    rows_kept_back: int = 0
    kept_for_waiting: int = 0  # chunks of the CPU tier, summed over the steps
    overtakes: int = 0  # times another waiting request than the first was to be admitted next
    fair_steps: int = 0  # that left a flood's prompts out
    flood_steps: int = 0  # that computed few tokens of one's
    settled: int = 0  # chunks
    finished: int = 0
    aborted: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)  # of each request's prompt, when it began last


class Engine:
    def __init__(self, shape: Shape, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(_MODEL | {"max_position_embeddings": 2 * shape.tokens_max}))
        self.shape = shape
        connector_base.refuses_recompute = lambda: shape.refuses_recompute
        self.config = _engine_config(shape, folder)
        self.config.cache_config.num_gpu_blocks = shape.device_blocks
        if STATES in shape.windows:
            self.config.cache_config.mamba_cache_mode = "align"  # as vLLM sets it for such a model
        self.groups = [f"group{index}" for index in range(len(shape.windows))]
        self.kv_config = _kv_cache_config(shape, self.groups)
        hash_fn = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self.hash_tokens = BLOCK_TOKENS // shape.window_parts
        self._block_hasher = get_request_block_hasher(self.hash_tokens, hash_fn)
        self._worker: Any = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, self.kv_config)
        self._worker.connector_worker.idle_step_seconds_max = 0.0  # bytes move between steps alone
        layer_bytes = shape.device_blocks * BLOCK_TOKENS * TOKEN_BYTES
        if SINCE_0_30:  # one allocation for all
            caches = list(torch.zeros(LAYERS * layer_bytes, dtype=torch.uint8).split(layer_bytes))
        else:
            caches = [torch.zeros(layer_bytes, dtype=torch.uint8) for _ in range(LAYERS)]
        # As vLLM lays out several groups: the layers of one group share their tensors with those of the others.
        self._worker.register_kv_caches(
            {
                f"{name}.{layer}": [view] if shape.windows[group] == STATES else view
                for group, name in enumerate(self.groups)
                for layer, view in enumerate(self._view(cache, shape.block_tokens(group)) for cache in caches)
            }
        )
        if shape.layerwise:
            assert len(self._worker.connector_worker._layerwise._copies) == LAYERS, (
                "its layers are not loaded one by one"
            )
        self.kv = [cache.numpy().view(np.uint64).reshape(shape.device_blocks, BLOCK_TOKENS) for cache in caches]
        self.copiers: dict[Direction, ManualCopier] = self._worker.connector_worker.spec.copiers
        self.scheduler = (AsyncScheduler if shape.asynchronous else Scheduler)(
            self.config, self.kv_config, StructuredOutputManager(self.config), BLOCK_TOKENS, self.hash_tokens
        )
        assert self.scheduler.recompute_kv_load_failures, "a failed load would end its request"
        manager = self._scheduler_half.manager
        self.tier: RandomTier | None = manager.secondary_tiers[0] if shape.shared_tier else None
        for tier in manager.secondary_tiers:  # so near that a load may begin whenever half of it is there
            manager._gates[tier].load_rate.add(1e15, 1.0, 0.0)
        self.pace(1.0)
        self.meetings: Counter[MeetingOutcome] = Counter()
        if (order := feature_of(self._scheduler_half.features, QueueOrder)) is not None:
            plan = order._plan

            def counting_plan(candidates: list[Request], now: float) -> None:
                plan(candidates, now)
                self.figures.overtakes += order._planned[0] is not candidates[0]

            order._plan = counting_plan
            order.clock = lambda: 0.25 * self.figures.steps  # seconds: some requests wait for the bound
        if (fair := feature_of(self._scheduler_half.features, FairSteps)) is not None:
            fair._shares = shares = StepShares(BLOCK_TOKENS)
            fair._clock = lambda: 0.25 * self.figures.steps
            next_step = shares.next_step

            def counting_step(waiting: Collection[Party], now: float, present: Collection[Party]) -> Step | None:
                chosen = next_step(waiting, now, present)
                self.figures.fair_steps += chosen is not None and chosen.tokens is None
                self.figures.flood_steps += chosen is not None and chosen.tokens is not None
                return chosen

            shares.next_step = counting_step  # type: ignore[method-assign]
        count = manager.count_meeting
        manager.count_meeting = lambda outcome: (self.meetings.update([outcome]), count(outcome))
        if shape.layerwise:  # whatever it costs the other requests
            half = self._scheduler_half
            half.others_wait_ms_max, half._load_rate = math.inf, RateMeter(1.0, pinned=1.0)
        self._stale: set[str] = set()  # computed with what was not loaded, and not begun again since
        self._excused: set[str] = set()  # those of them that earlier steps have reported
        self._rows: dict[str, _Row] = {}
        self.scheduled: deque[SchedulerOutput] = deque()  # steps that the workers have not run
        self._requests: dict[str, Request] = {}  # requests of a running step may have been aborted since
        self._digests: dict[str, list[int]] = {}
        self._weights = 0  # which of them computes
        self.rng = random.Random(0)
        self.figures = Figures()
        self.last_step: dict[str, int] = {}  # tokens by request
        self.may_fail = self.may_reset = True
        self.trace: list[str] = []  # of the schedule that runs
        for copier in self.copiers.values():
            copier.trace = self.trace

    @property
    def block_bytes(self) -> int:
        """The size of a block in all layers of one group."""
        return LAYERS * BLOCK_TOKENS * TOKEN_BYTES

    def _view(self, cache: torch.Tensor, block_tokens: int) -> torch.Tensor:
        """A layer's cache as vLLM registers it; since 0.30 (blocks, heads, tokens, bytes of a token)."""
        shape = self.shape.device_blocks, BLOCK_TOKENS // block_tokens, block_tokens, TOKEN_BYTES
        return cache.view(shape) if SINCE_0_30 else cache

    def pace(self, prefill_tokens_per_second: float) -> None:
        """Let the engine believe that it computes at this rate; a tier of prompts that are computed meanwhile is
        slower."""
        if not self.shape.meetings:
            return
        manager = self._scheduler_half.manager
        manager.prefill_rate = RateMeter(1.0, pinned=prefill_tokens_per_second)
        loaded = 0.8 * prefill_tokens_per_second / manager._chunk_tokens * manager._chunk_bytes
        for gate in manager._gates.values():
            gate.load_rate = RateMeter(1.0, pinned=loaded)

    def set_tier_clock(self, clock: Callable[[], float]) -> None:
        """Set the clock by which the CPU tier knows when requests end and sessions pause."""
        manager = self._scheduler_half.manager
        manager._clock = manager.primary_tier._clock = clock

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Sets the clock that prompts go by which are computed while their end is loaded."""
        self._scheduler_half.meetings._clock = clock

    @property
    def jumps(self) -> int:
        """Requests that have met their load."""
        meetings = self._scheduler_half.meetings
        return 0 if meetings is None else int(meetings.jumps)

    # -- actions of a random schedule

    def submit(self, name: str, prompt: list[int], answer_tokens: int, transfer_params: Any = None) -> None:
        """transfer_params: as a client wrote them, of whatever type."""
        if transfer_params is None and self.shape.fair_steps:
            transfer_params = {"spillway_session": {"id": name[-1]}}
        extra = {} if transfer_params is None else {"kv_transfer_params": transfer_params}
        sampling = SamplingParams(max_tokens=answer_tokens, ignore_eos=True, temperature=0.0, extra_args=extra)
        self._requests[name] = Request(name, prompt, sampling, None, block_hasher=self._block_hasher)
        self.scheduler.add_request(self._requests[name])
        self._digests[name] = []

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.figures.aborted += 1

    def force_reset(self, *, with_connector: bool) -> None:
        """Reset the prefix cache, whatever requests hold: those that run are preempted, those that load are computed.

        Does nothing while the workers have not run a step: without async scheduling vLLM would sample its tokens
        twice."""
        if self.scheduled:
            return
        pool, cpu_tier = self.scheduler.kv_cache_manager.block_pool, self._scheduler_half.manager.primary_tier
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=with_connector)
        assert not self.scheduler._inflight_prefills, "a reset left blocks reserved for requests that hold none"
        assert not len(pool.cached_block_hash_to_block), "a reset left blocks in the device's prefix cache"
        assert not (with_connector and cpu_tier.resident), "a reset left chunks in the CPU tier"
        self.figures.resets_of_all += 1

    def pause(
        self, *, keeps_running: bool, sleeps: bool = False, move_bytes: Callable[[], None], steps_max: int = 1_000
    ) -> None:
        """Pause, reset all caches and resume, as vLLM's engine core does. keeps_running: the mode `keep`, else `wait`.
        sleeps: sleep at level 1, which drops the device's memory and keeps the CPU tier."""
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL if keeps_running else PauseState.PAUSED_NEW)
        for _ in range(steps_max):
            if not (self.scheduled or self.scheduler.has_requests()):
                break
            move_bytes()
            self.step(meanwhile=move_bytes)
        else:
            raise AssertionError(f"a pause did not end within {steps_max} steps")
        assert not self._scheduler_half.copies_under_way(), "a pause ended before its copies"
        chunks = len(self._scheduler_half.manager.primary_tier.resident)
        self.force_reset(with_connector=not sleeps)
        if sleeps:
            assert len(self._scheduler_half.manager.primary_tier.resident) == chunks, "a sleep took chunks"
            for layer in self.kv:
                layer[:] = 0
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        self.figures.pauses += 1

    def reset_device_cache(self) -> None:
        self.scheduler.reset_prefix_cache()

    def reset_prefix_cache(self) -> bool:
        """Resets the caches of device and connector: both drop everything, or neither does."""
        half = self._scheduler_half
        pool, cpu_tier = self.scheduler.kv_cache_manager.block_pool, half.manager.primary_tier
        before = dict(cpu_tier._rows), set(cpu_tier.ready), set(half._jobs), len(pool.cached_block_hash_to_block)
        done = self.scheduler.reset_prefix_cache(reset_connector=True)
        self.figures.rows_kept_back += len(cpu_tier.quarantine)
        if done:
            assert not cpu_tier.resident, "a reset left chunks in the CPU tier"
            assert not len(pool.cached_block_hash_to_block), "a reset left blocks in the device's prefix cache"
        else:
            after = dict(cpu_tier._rows), set(cpu_tier.ready), set(half._jobs), len(pool.cached_block_hash_to_block)
            assert after == before, "a refused reset changed something"
        self.figures.resets += done
        self.figures.resets_refused += not done
        return done

    def change_weights(self) -> None:
        """The connector drops everything at once, even with jobs running."""
        self._scheduler_half.weights_changing("the test")
        self.figures.rows_kept_back += len(self._scheduler_half.manager.primary_tier.quarantine)
        self.figures.resets_forced += 1

    def name_weights(self, version: int) -> str | None:
        """The engine gets other weights between two steps, and they are named. Returns why the name was refused."""
        connector: Any = self.scheduler.connector
        if not blocks_in_use(self.scheduler.kv_cache_manager.block_pool):
            self._scheduler_half.weights_changing("the test")
            self._weights = version
            self._digests = {name: [] for name in self._digests}
            self.figures.named += 1
        refused: str | None = connector.name_weights(f"version-{version}", self.scheduler.reset_prefix_cache)
        return refused

    def settle(self) -> None:
        """Let the engine step without requests until all is settled, and store what its device alone holds."""
        half = self._scheduler_half
        before = half.manager.settled_chunks
        half.without_requests.settle(3600.0)
        self.drain()
        half.without_requests.settle(0.0)
        self.figures.settled += half.manager.settled_chunks - before
        assert not (left := half.without_requests._unsettled()), f"{left} chunks are in no shared tier"

    def unfinished(self) -> list[Request]:
        return [request for request in self.scheduler.requests.values() if not request.is_finished()]

    # -- a step, in the order of vLLM's engine core and model runner

    def step(self, meanwhile: Callable[[], None] = lambda: None, *, steps_ahead: int = 0) -> None:
        """meanwhile: called after the step is scheduled and before the workers receive it.
        steps_ahead: how many steps are scheduled beyond the one that runs, as with vLLM's batch queue."""
        if not self.shape.asynchronous and (self.shape.drafts or self.shape.layerwise):
            # vLLM would schedule a negative number of tokens; and without asynchronous scheduling it runs ahead of a
            # step only with pipeline parallelism, which has no loads within steps.
            steps_ahead = 0
        while len(self.scheduled) <= steps_ahead:
            self.schedule()
            meanwhile()
        self._run(self.scheduled.popleft())

    def schedule(self) -> None:
        output = self.scheduler.schedule()
        self.scheduled.append(output)
        region = getattr(self._scheduler_half, "_step_region", None)  # since 0.33
        assert region is None, "vLLM holds the manager's lock beyond the step"
        self._require_known_drafts(output)
        self.last_step = dict(output.num_scheduled_tokens)
        self.figures.steps += 1
        self._record_step(output, output.kv_connector_metadata)
        self._require_kept_for_waiting()
        self.figures.early_loads += sum(piece.last for piece in getattr(output.kv_connector_metadata, "pieces", ()))
        self.figures.step_loads += len(getattr(output.kv_connector_metadata, "step_loads", ()))

    def _require_known_drafts(self, output: SchedulerOutput) -> None:
        """Require that a step of asynchronous scheduling has only drafts that the worker made in its last step."""
        if self.shape.asynchronous and self.shape.fair_steps:
            unknown = output.scheduled_spec_decode_tokens.keys() - self.last_step.keys()
            # vLLM 0.30 and later fill the first step of a request up with drafts of no meaning.
            unknown -= {new.req_id for new in output.scheduled_new_reqs}
            unknown -= output.scheduled_cached_reqs.resumed_req_ids
            assert not unknown, f"{unknown} were left out of the step that made their drafts"

    def _require_kept_for_waiting(self) -> None:
        """The CPU tier keeps at most its share, for requests that have no blocks alone."""
        tier = self._scheduler_half.manager.primary_tier
        assert len(tier.waiting.kept) <= self.shape.cpu_rows * KEPT_SHARE_MAX
        for name in tier.waiting._waiting:
            status = self.scheduler.requests[name].status
            assert status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), f"{name} is {status.name}"
        self.figures.kept_for_waiting += len(tier.waiting.kept)

    def _run(self, output: SchedulerOutput) -> None:
        meta: Any = output.kv_connector_metadata
        self._worker.handle_preemptions(meta)
        self._apply_to_worker(output)
        self._worker.bind_connector_metadata(meta)
        replayed = self.shape.layerwise and self.rng.random() < 0.1
        mode = CUDAGraphMode.FULL if replayed else CUDAGraphMode.NONE
        metadata = {} if output.num_scheduled_tokens else None
        self._worker.start_load_kv(SimpleNamespace(attn_metadata=metadata, cudagraph_runtime_mode=mode))
        sampled = self._compute(output, replayed)
        self._worker.wait_for_save()
        done = KVConnectorOutput()
        if SINCE_0_30:
            results = self._worker.get_transfer_results(output.finished_req_ids)
            done.finished_sending, done.finished_recving = results.finished_sending, results.finished_recving
            done.failed_recving = results.failed_recving
        else:
            done.finished_sending, done.finished_recving = self._worker.get_finished(output.finished_req_ids)
        done.invalid_block_ids = self._worker.get_block_ids_with_load_errors()
        done.kv_connector_stats = self._worker.get_kv_connector_stats()
        done.kv_connector_worker_meta = self._worker.build_connector_worker_meta()
        self._worker.clear_connector_metadata()
        self._require_reported(output, done.invalid_block_ids)
        failed = getattr(done, "failed_recving", set())
        self.figures.failures += bool(done.invalid_block_ids or failed)
        if done.finished_recving or done.invalid_block_ids:
            invalid = sorted(done.invalid_block_ids)
            self.trace.append(f"  received {done.finished_recving}, failed {failed}, invalid {invalid}")
        names = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=[sampled[name] for name in names],
                kv_connector_output=done,
            ),
        )
        self._require_taken_back(done.invalid_block_ids)
        if self.shape.drafts and not self.shape.asynchronous:
            drafts = {name: self._rows[name].draft for name in names if sampled[name]}
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))

    def _record_step(self, output: SchedulerOutput, meta: Any) -> None:
        """Record the step for the message of a failed assertion."""
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        if not (output.num_scheduled_tokens or output.finished_req_ids or meta.jobs_to_flush or meta.load_jobs):
            return
        self.trace.append(
            f"step: {dict(output.num_scheduled_tokens)}, resumed {resumed}, preempted {output.preempted_req_ids}, "
            f"finished {output.finished_req_ids}, flush {meta.jobs_to_flush}"
        )
        for load in getattr(meta, "step_loads", ()):
            offered_again = load.request_id in self._scheduler_half._recompute_only
            assert not offered_again, f"{load.request_id} loads again what it should recompute"
            sides = " -> ".join(_ids(side) for side in load.transfer_spec)
            self.trace.append(f"  load {load.job_id} of {load.request_id} within the step: {sides}")
        for kind, jobs in (("load", meta.load_jobs), ("store", meta.store_jobs)):
            for job_id, job in jobs.items():
                source, target = (job.src_spec, job.dst_spec) if SINCE_0_30 else job.transfer_spec
                self.trace.append(f"  {kind} {job_id} of {job.req_id}: {_ids(source)} -> {_ids(target)}")
        for piece in getattr(meta, "pieces", ()):
            what = "" if piece.transfer_spec is None else " -> ".join(_ids(side) for side in piece.transfer_spec)
            end = f", last, lost {piece.lost_blocks}" if piece.last else ""
            self.trace.append(f"  piece {piece.piece_id} of load {piece.job_id} of {piece.request_id}: {what}{end}")
        for new in output.scheduled_new_reqs:
            self.trace.append(f"  new {new.req_id}: computed {new.num_computed_tokens}, blocks {new.block_ids}")

    def _apply_to_worker(self, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids:
            self._rows.pop(name, None)
        for name in output.preempted_req_ids or ():
            self._rows.pop(name, None)
            self.figures.preemptions += 1
        for new in output.scheduled_new_reqs:
            self._stale.discard(new.req_id)
            self.figures.cached_tokens[new.req_id] = new.num_computed_tokens
            self._rows[new.req_id] = _Row([list(blocks) for blocks in new.block_ids], new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[at]
            if name in cached.resumed_req_ids:
                assert blocks is not None
                self._stale.discard(name)
                self._rows[name] = _Row([list(group) for group in blocks])
            elif blocks is not None:
                for known, more in zip(self._rows[name].blocks, blocks, strict=True):
                    known.extend(more)
            self._rows[name].believed = max(self._rows[name].believed, cached.num_computed_tokens[at])
            if name in cached.resumed_req_ids:
                self._rows[name].computed = cached.num_computed_tokens[at]
            elif not self.shape.asynchronous:  # else it counts drafts that were rejected since
                assert self._rows[name].computed == cached.num_computed_tokens[at]

    def _compute(self, output: SchedulerOutput, replayed: bool) -> dict[str, list[int]]:
        """replayed: as one graph, which calls no hook."""
        works: dict[str, _Work] = {}
        for name, count in output.num_scheduled_tokens.items():
            works[name] = self._work(name, count, len(output.scheduled_spec_decode_tokens.get(name, ())))
        for layer in range(LAYERS):
            if not replayed:
                for group in self.groups:
                    self._worker.wait_for_layer_load(f"{group}.{layer}")
            for name, work in works.items() if self.shape.checks_bytes else ():
                self._attend(name, work, layer)
        return {name: self._sample(name, work) for name, work in works.items()}

    def _work(self, name: str, count: int, drafted: int) -> _Work:
        request, row = self._requests[name], self._rows[name]
        tokens = list(request.all_token_ids)
        # vLLM 0.30 and later want a step's tokens from some requests that have no draft yet.
        draft = (row.draft + [_NO_TOKEN] * drafted)[:drafted]
        real = count - len(draft)
        unknown = row.computed + real > len(tokens)
        if name in self._stale:
            unknown = True
        elif unknown:  # it has ended since it was scheduled: this step's tokens are unknown
            assert request.is_finished() and self.shape.asynchronous, name
        if unknown:
            return _Work(row, [], [_WRONG_DIGEST] * (row.computed + count), draft, count, len(tokens))
        digests = self._digests_of(name, tokens)[: len(tokens)]
        guessed = _continued(digests[: row.computed + real], draft)
        return _Work(row, digests, guessed, draft, real, len(tokens))

    def _attend(self, name: str, work: _Work, layer: int) -> None:
        """Read the KV of one layer that the new tokens need, then write theirs."""
        if work.digests and name not in self._stale:
            for group, window in enumerate(self.shape.windows):
                wrong = self._wrong_token(work.row, group, window, work.digests, layer)
                if wrong is not None:
                    where = f"{name}: group {group}, layer {layer}: token {wrong} of {work.row.computed}"
                    assert self.shape.layerwise, where
                    self.trace.append(f"  wrong: {where}")
                    self._stale.add(name)
        self._write(name, work, layer)

    def _sample(self, name: str, work: _Work) -> list[int]:
        row = work.row
        if name in self._stale:
            row.computed += work.real
            return [_WRONG_TOKEN] if row.computed >= work.tokens else []
        if not work.digests:
            return []
        row.computed += work.real
        if row.computed < work.tokens:
            return []
        answer = [_next_token(work.written[row.computed - 1])]
        for token in work.draft:
            if token != answer[-1]:
                break
            answer.append(_next_token(work.written[row.computed]))
            row.computed += 1
        self.figures.accepted += len(answer) - 1
        self.figures.rejected += len(work.draft) - len(answer) + 1
        row.draft = self._draft(_continued(work.digests, answer))
        return answer

    def _require_reported(self, output: SchedulerOutput, invalid_blocks: set[int]) -> None:
        """Require that a request computed with KV that had not been loaded is reported in the same step."""
        for name in self._stale & output.num_scheduled_tokens.keys() - self._excused:
            blocks = {block for group in self._rows[name].blocks for block in group}
            assert not blocks.isdisjoint(invalid_blocks), f"{name} computed with blocks that were not reported"

    def _require_taken_back(self, invalid_blocks: set[int]) -> None:
        """vLLM has taken none of the tokens that follow from such KV."""
        if invalid_blocks:
            self.figures.steps_taken_back += bool(self._stale)
            for output in self.scheduled:  # sent before this step's failure was known
                for name in output.num_scheduled_tokens:
                    request = self.scheduler.requests.get(name)
                    if request is None or request.status is RequestStatus.PREEMPTED:
                        self._stale.add(name)
        self._excused = set(self._stale)
        for name in self._stale:
            assert _WRONG_TOKEN not in self._requests[name].output_token_ids, f"{name} kept a wrong token"

    def _write(self, name: str, work: _Work, layer: int) -> None:
        """The KV of one layer of the tokens behind those computed."""
        row = work.row
        for group, window in enumerate(self.shape.windows):
            # Of states there is one, in the block of the last token.
            first = len(work.written) - 1 if window == STATES else row.computed
            for position in range(first, len(work.written)):
                number, place = divmod(position, self.shape.block_tokens(group))
                block = row.blocks[group][number]
                assert block, f"{name}: token {position} has no block of group {group}"
                digest = _WRONG_DIGEST if name in self._stale else work.written[position]
                self.kv[layer][block, place] = digest + 10 * group + layer

    def _draft(self, digests: list[int]) -> list[int]:
        """Tokens that the model would sample behind these, up to a wrong one."""
        draft: list[int] = []
        while len(draft) < self.shape.drafts:
            right = self.rng.random() < 0.7
            draft.append(_next_token(digests[-1]) if right else self.rng.randrange(3))
            digests = _continued(digests[-1:], draft[-1:])
        return draft

    def _wrong_token(self, row: _Row, group: int, window: int | None, digests: list[int], layer: int) -> int | None:
        """The first token that the new ones read whose KV is not what was computed.

        vLLM's asynchronous scheduler frees what lies before the window of the tokens that it believes to be computed.
        Where drafts are rejected then, that is up to a draft's length too much, with any connector and with none.
        """
        if window == STATES:
            first = max(0, row.computed - 1)
        else:
            first = 0 if window is None else max(0, max(row.computed, row.believed) - window + 1)
        for position in range(first, row.computed):
            number, place = divmod(position, self.shape.block_tokens(group))
            block = row.blocks[group][number]
            if int(self.kv[layer][block, place]) != digests[position] + 10 * group + layer:
                return position
        self.figures.checked_tokens += (row.computed - first) * (layer == 0)
        return None

    def _digests_of(self, name: str, tokens: list[int]) -> list[int]:
        self._digests[name] = _continued(self._digests[name], tokens[len(self._digests[name]) :], self._weights)
        return self._digests[name]

    def settle_nvme(self) -> None:
        """Wait until the tier's threads have ended all jobs; the scheduler receives that in a later step."""
        for tier in self._scheduler_half.manager.secondary_tiers:
            if isinstance(tier, SharedTierBase):
                assert tier._shared.drain(60.0)

    def _await_answers(self) -> None:
        """Waits a while for answers of the NVMe tier's lookups: steps before its thread has answered change nothing."""
        for tier in self._scheduler_half.manager.secondary_tiers:
            if isinstance(tier, SharedTierBase):
                lookups = tier._shared._lookups
                if lookups.has_work and not lookups._answers and not lookups._to_take_in:
                    tier._shared.wait_for_progress(1.0)

    # -- invariants of an idle engine

    def drain(self, steps_max: int = 2_000) -> None:
        """Step until all requests and jobs have ended; raises AssertionError if one does not."""
        connector = self._scheduler_half
        for _ in range(steps_max):
            for copier in self.copiers.values():
                copier.advance(1_000)
            if self.tier is not None:
                self.tier.advance(1_000, 1_000)
            self.settle_nvme()
            self._await_answers()
            # The engine core steps while requests are unfinished or finished ones are to be reported to the workers.
            if not (self.scheduled or self.scheduler.has_requests() or _under_way(connector)):
                break
            self.step()
        else:
            waiting = [(request.request_id, request.status.name) for request in self.unfinished()]
            raise AssertionError(f"after {steps_max} steps there are still {waiting}, jobs {list(connector._jobs)}")
        self._requests.clear()
        self._digests.clear()
        self._stale.clear()
        self.trace.clear()

    def require_nothing_left(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.shape.device_blocks - 1, "device blocks leaked"
        assert not self.scheduler.requests
        half = self._scheduler_half
        tier = half.manager.primary_tier
        held_by_scheduler = (
            "_jobs",
            "_req_status",
            "_block_id_to_pending_jobs",
            "_chunks_being_loaded" if SINCE_0_30 else "_blocks_being_loaded",
            "_failed_jobs",
        )
        for held in held_by_scheduler:
            assert not getattr(half, held), f"the scheduler's {held}: {getattr(half, held)}"
        assert not half._early_loads.loads
        assert not half._recompute_only
        if (order := feature_of(half.features, QueueOrder)) is not None:
            assert not order._planned and not order._found, "requests that have ended are still in the queue's order"
        waiting = feature_of(half.features, WaitingRequests)
        assert not waiting._arrived and not waiting._waited and not tier.waiting.kept and not len(tier.waiting), (
            "kept for no request"
        )
        if (late := half.late_stores) is not None:
            left = (late._jobs, late._copied_blocks, late._to_hold, late._held_blocks)
            assert not any(left), f"late stores: {left}"
        if self.shape.meetings:
            assert half.meetings.idle, vars(half.meetings)
            ended = self.meetings[MeetingOutcome.MET] + self.meetings[MeetingOutcome.ABANDONED]
            assert self.meetings[MeetingOutcome.PLANNED] == ended, self.meetings
        if self.shape.layerwise:
            assert not half._step_loads and not half._step_requests and not half._planned
        assert not tier._readers, "rows are still pinned"
        assert tier.ready == set(tier.resident), "rows are still being written"
        rows = list(tier._rows.values()) + list(tier._free_list)
        assert len(rows) == len(set(rows)), "a row has two owners"
        assert len(rows) == tier._allocated_rows, "rows leaked"
        assert not half.manager._bounds.waits
        assert not half.manager._failed_stores
        assert not half.manager._early_chunks
        assert not half._reset_jobs and not half.manager._reset_rows and not tier.quarantine, "rows kept back"
        assert not half.manager._bounds.rows_in_flight
        worker = self._worker.connector_worker
        assert worker._jobs.idle, f"the worker holds {vars(worker._jobs)}"
        assert all(copier.idle for copier in self.copiers.values())

    @property
    def _scheduler_half(self) -> Any:
        connector: Any = self.scheduler.connector
        return connector.connector_scheduler

    def close(self) -> None:
        self._worker.shutdown()
        self.scheduler.shutdown()


def _continued(digests: list[int], tokens: list[int], weights: int = 0) -> list[int]:
    """The digests, continued by that of each token with all tokens before it. weights: those that compute them all."""
    longer = list(digests)
    for token in tokens:
        before = longer[-1] if longer else weights
        longer.append(xxhash.xxh64_intdigest(before.to_bytes(8, "little") + int(token).to_bytes(4, "little")) >> 8)
    return longer


def _next_token(digest: int) -> int:
    return int(digest % 500) + 3


def _under_way(half: Any) -> bool:
    return bool(half.copies_under_way() or half.manager._transfer_jobs)


def _ids(spec: Any) -> str:
    ids = getattr(spec, "block_ids", None)
    return f"{type(spec).__name__} {None if ids is None else ids.tolist()}"


def _engine_config(shape: Shape, folder: Path) -> VllmConfig:
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=shape.tokens_max,
        max_num_seqs=shape.requests_max,
        max_num_batched_tokens=shape.step_tokens,
        enable_chunked_prefill=True,
        num_gpu_blocks_override=shape.device_blocks,
        enable_prefix_caching=True,
        prefix_caching_hash_algo="sha256_cbor",
        speculative_config=_speculation(shape),
        kv_transfer_config={
            "kv_connector": "SpillwayConnector",
            "kv_connector_module_path": "spillway_connector.engine.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "fail" if shape.refuses_recompute else "recompute",
            "kv_connector_extra_config": {
                "spec_name": "ManualSpec",
                "spec_module_path": "engine_lives.manual_copies",
                "num_cpu_blocks": shape.cpu_rows,
                "blocks_per_chunk": shape.blocks_per_chunk,
                "generated_tokens": shape.generated_tokens,
                "storing": shape.storing,
                "layerwise_loads": "on" if shape.layerwise else "off",
                "compute_while_loading": "on" if shape.meetings else "off",
                "fair_steps": "on" if shape.fair_steps else "off",
                "prefill_tokens_per_second": 1.0,
                "secondary_tiers": _tiers(shape, folder),
                **({"request_wait_seconds": 60.0} if shape.nvme_tier else {}),
            },
        },
    ).create_engine_config()


def _speculation(shape: Shape) -> dict[str, Any] | None:
    if not shape.drafts:
        return None
    return {"method": "ngram", "num_speculative_tokens": shape.drafts, "prompt_lookup_max": 2}


def _tiers(shape: Shape, folder: Path) -> list[dict[str, Any]]:
    nvme = {"type": "nvme", "path": str(folder / "tier"), "mode": "files"} | _PATIENT_LIMITS
    return [{"type": RANDOM}] * shape.shared_tier + [nvme] * shape.nvme_tier


def _kv_cache_config(shape: Shape, groups: list[str]) -> KVCacheConfig:
    common = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    page = BLOCK_TOKENS * TOKEN_BYTES
    states = MambaSpec(
        block_size=BLOCK_TOKENS,
        shapes=((BLOCK_TOKENS, TOKEN_BYTES // 4),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    )
    specs = [
        FullAttentionSpec(**common)
        if window is None
        else states
        if window == STATES
        else SlidingWindowSpec(
            **common
            | {"block_size": shape.block_tokens(group), "num_kv_heads": shape.window_parts, "sliding_window": window}
        )
        for group, window in enumerate(shape.windows)
    ]
    assert {spec.page_size_bytes for spec in specs} == {page}
    return KVCacheConfig(
        num_blocks=shape.device_blocks,
        kv_cache_tensors=_kv_cache_tensors(page * shape.device_blocks, page, groups),
        kv_cache_groups=[
            KVCacheGroupSpec([f"{group}.{layer}" for layer in range(LAYERS)], spec)
            for group, spec in zip(groups, specs, strict=True)
        ],
    )


def _kv_cache_tensors(layer_bytes: int, page: int, groups: list[str]) -> list[KVCacheTensor]:
    """The layers of all groups in the same memory, one behind the other."""
    if not SINCE_0_30:
        return [
            KVCacheTensor(size=layer_bytes, shared_by=[f"{group}.{layer}" for group in groups])
            for layer in range(LAYERS)
        ]
    return [
        KVCacheTensor(
            size=layer_bytes * LAYERS,
            layers=[f"{group}.{layer}" for layer in range(LAYERS)],
            layer_stride=layer_bytes,
            block_stride=page,
        )
        for group in groups
    ]
