"""Cost of KV offload on the scheduler's thread in one engine step, with a thousand chunks in use.

    python bench/scheduler_step.py [--steps 2000] [--chunks 1000] [--requests 8] [--only ready,misses]

vLLM's scheduler asks its KV connector about every waiting request in every step, on a thread that blocks the whole
engine. This drives our connector's scheduler half with a real CPU tier and a real NVMe tier, and upstream's
(`TieringOffloadingManager` with its `fs` tier), through the same steps: look up every waiting request, build the step's
metadata, take in what the workers report, collect statistics. Chunks are 4 KiB, so that the disk does not matter.

    ready       every chunk is in the CPU tier, and the device has no room: looked up in every step
    pending     every chunk waits for the shared tier
    promotions  a request arrives in every step; the shared tier loads its chunks before the next step, in which they
                are loaded to the device; it finishes in the one after
    stores      a request is computed and stored in every step, while the others wait as in `ready`; a store of the
                shared tier ends before the next step
    misses      unseen requests arrive and finish
    decode_8    8 requests compute a token each, while nothing waits and nothing is copied
    decode      the same with 64 requests
    answers     256 requests of 256 chunks wait for one answer of the shared tier, all of them absent; each step that
                processes a part of it is measured (Spillway alone: upstream asks the file system within the step)

`new` is the work done once per request, on arrival: register it, compute its keys, look them up for the first time.
`step` is everything else in a step: waiting requests, loads, stores, finished requests. `all` is a whole step with its
arrivals. What vLLM itself creates (requests with their block hashes, allocated blocks, the scheduler's output) is
created between the measurements, for both sides.

`fixed loop` is a thousand look-ups in a dict, timed like a step: the distance of its p99 from its p50 is the machine's
noise.

The rivals of a scenario take their steps in turns. Wall time includes other processes of this machine; CPU time is this
thread's alone. Background threads get 2 ms after each step, as they do while a model runs. Writes
build/bench/scheduler_step.json (flat; units are in the keys).
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
from bench_report import write_report
from memory_folder import memory_folder
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.tiering.fs import manager as fs_manager
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from spillway_connector.config import ConnectorConfig
from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.cpu_tier.tier import CpuTier
from spillway_connector.engine.ipc.messages import SpillwayWorkerMetadata
from spillway_connector.engine.ipc.statistics_due import StatisticsDue
from spillway_connector.engine.shared_tiers import open_shared_tier
from spillway_connector.engine.v023.scheduler import SpillwayConnectorScheduler
from spillway_connector.engine.v023.tier_adapter import SharedTierAdapter
from spillway_connector.engine.v023.tiering import SpillwayTieringManager
from spillway_connector.namespace import Namespace
from spillway_connector.node.region import NodeRegion
from spillway_connector.testing.generation import make_cpu_tier, make_node_tier
from spillway_connector.testing.memory import unnamed_region
from spillway_connector.tiers.disk.slab.writers import new_number
from spillway_connector.tiers.tier import Tier

BLOCK_TOKENS, ROW_BYTES = 128, 4096
WARM_STEPS = 100
PAUSE_SECONDS = 0.002
NODE_NAMESPACE = bytes(16)
FOREVER_SECONDS = 3600.0
DEVICE_BLOCKS = [KVCacheBlock(number) for number in range(1, 4096)]  # made once, as by vLLM's block pool
SCENARIOS = ("ready", "pending", "promotions", "stores", "misses", "decode_8", "decode", "answers")
ANSWER_REQUESTS, ANSWER_CHUNKS = 256, 256
OUTPUT = Path("build/bench/scheduler_step.json")


class BenchRequest(SimpleNamespace):
    """The part of vLLM's Request that the connector reads; its keys follow from `prompt`."""

    def __init__(self, request_id: str, prompt: int, chunks: int) -> None:
        super().__init__(
            request_id=request_id,
            kv_transfer_params=None,
            cache_salt=None,
            block_hashes=[prompt.to_bytes(8, "big") * 3 + number.to_bytes(8, "big") for number in range(chunks)],
            num_tokens=chunks * BLOCK_TOKENS + 1,
            num_prompt_tokens=chunks * BLOCK_TOKENS + 1,
            num_computed_tokens=0,
            skip_reading_prefix_cache=False,
            status=RequestStatus.RUNNING,
            finished=False,
        )
        self.block_ids = list(range(1, chunks + 1))
        self.blocks = KVCacheBlocks((DEVICE_BLOCKS[:chunks],))

    def is_finished(self) -> bool:
        return bool(self.finished)


class Rig(ABC):
    """One scheduler half on real tiers in `folder`, driven through the steps of an engine."""

    metadata: type[OffloadingWorkerMetadata]

    def __init__(self, scheduler: OffloadingConnectorScheduler, region: HostRegion, hold: threading.Event) -> None:
        self.scheduler = scheduler
        self.hold = hold  # while clear, the shared tier gives no answer
        self._region = region
        self._names = 0
        self._meta: OffloadingConnectorMetadata | None = None  # of the last step
        self._output: SimpleNamespace
        self._report: KVConnectorOutput

    def make_request(self, prompt: int, chunks: int) -> BenchRequest:
        self._names += 1
        return BenchRequest(f"request-{self._names}", prompt, chunks)

    def register(self, request: BenchRequest) -> None:
        self.scheduler.on_new_request(request)

    def ask(self, request: BenchRequest) -> int | None:
        tokens: int | None = self.scheduler.get_num_new_matched_tokens(request, 0)[0]
        return tokens

    def before_step(self, computed: Sequence[BenchRequest] = (), decoding: Sequence[BenchRequest] = ()) -> None:
        """Create vLLM's objects of a step in which `computed` are prefilled and each of `decoding` computes a token;
        the workers have copied since the last step."""
        scheduled = {request.request_id: request.num_tokens for request in computed}
        scheduled |= dict.fromkeys((request.request_id for request in decoding), 1)
        self._output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=request.request_id, block_ids=(request.block_ids,), num_computed_tokens=0)
                for request in computed
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request.request_id for request in decoding],
                new_block_ids=[None] * len(decoding),
                num_computed_tokens=[request.num_computed_tokens for request in decoding],
                resumed_req_ids=set(),
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids=None,
            finished_req_ids=set(),
        )
        ended: list[int] = []
        if self._meta is not None:
            ended = [*self._meta.store_jobs, *self._meta.load_jobs]
            ended += [piece.job_id for piece in getattr(self._meta, "pieces", ()) if piece.last]
        self._report = KVConnectorOutput(kv_connector_worker_meta=self.metadata(dict.fromkeys(ended, 1)))

    def end_step(self) -> None:
        """The rest of a step, after the look-ups."""
        self._meta = self.scheduler.build_connector_meta(self._output)
        self.scheduler.update_connector_output(self._report)
        self.statistics()

    def step(self, computed: Sequence[BenchRequest] = ()) -> None:
        self.before_step(computed)
        self.end_step()

    @abstractmethod
    def statistics(self) -> None:
        """Collect the statistics of a step."""

    def start_load(self, request: BenchRequest, tokens: int) -> None:
        self.scheduler.update_state_after_alloc(request, request.blocks, tokens)

    def finish(self, request: BenchRequest) -> None:
        request.finished = True
        self.scheduler.request_finished(request)

    def fill(self, prompts: Sequence[int], chunks: int) -> None:
        """Compute the prompts, so that both tiers hold them."""
        for prompt in prompts:
            request = self.make_request(prompt, chunks)
            self.register(request)
            self.ask(request)
            self.step([request])
            self.step()
            self.finish(request)
            self.settle()  # otherwise the CPU tier fills up with rows whose store is pending

    def settle(self) -> None:
        """Step until no job of the shared tier is running."""
        until = time.monotonic() + 60.0
        while self.scheduler.manager._transfer_jobs:
            if time.monotonic() > until:
                raise RuntimeError("the shared tier did not end its jobs within 60 s")
            time.sleep(PAUSE_SECONDS)
            self.step()

    @abstractmethod
    def ended_jobs(self) -> int:
        """Count the jobs that the shared tier has ended and that no step has processed."""

    def await_jobs(self) -> None:
        """Block until the next step can process every job of the shared tier."""
        until = time.monotonic() + 60.0
        while self.ended_jobs() < len(self.scheduler.manager._transfer_jobs):
            if time.monotonic() > until:
                raise RuntimeError("the shared tier did not end its jobs within 60 s")
            time.sleep(PAUSE_SECONDS / 10)

    def close(self) -> None:
        self.hold.set()
        self.scheduler.shutdown()
        self._region.cleanup()


class SpillwayRig(Rig):
    metadata = SpillwayWorkerMetadata

    def __init__(self, scheduler: OffloadingConnectorScheduler, region: HostRegion, hold: threading.Event) -> None:
        super().__init__(scheduler, region, hold)
        self._due = StatisticsDue()

    def statistics(self) -> None:
        self._due.planned(tokens=1)  # the bench's engine always computes something
        if self._due.take():
            self.scheduler.manager.take_stats()

    def ended_jobs(self) -> int:
        return len(self.scheduler.manager._shared_tiers[0]._shared._movers.ended)


class UpstreamRig(Rig):
    metadata = OffloadingWorkerMetadata

    def statistics(self) -> None:
        """Do nothing: vLLM's scheduler half has none."""

    def ended_jobs(self) -> int:
        return len(self.scheduler.manager.secondary_tiers[0]._pool._finished_q)


def held(tier: Tier, hold: threading.Event) -> Tier:
    """The tier, whose answers wait for `hold`."""
    contains, load = tier.contains, tier.load

    def held_contains(keys: Sequence[bytes], deadline: float) -> list[bool]:
        hold.wait()
        return contains(keys, deadline)

    def held_load(key: bytes, target: memoryview, deadline: float) -> None:
        hold.wait()
        load(key, target, deadline)

    tier.contains = held_contains  # type: ignore[method-assign]
    tier.load = held_load  # type: ignore[method-assign]
    tier.in_memory = lambda key, deadline: None  # type: ignore[method-assign]
    if tier.has_local_index:
        answer = tier.contains_now
        tier.contains_now = lambda keys: answer(keys) if hold.is_set() else None
    return tier


def fake_spec(manager: object, num_rows: int) -> SimpleNamespace:
    attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    return SimpleNamespace(
        gpu_block_size=(BLOCK_TOKENS,),
        hash_block_size=BLOCK_TOKENS,
        block_size_factor=1,
        offload_prompt_only=True,
        num_blocks=num_rows,
        kv_cache_config=KVCacheConfig(num_rows, [], [KVCacheGroupSpec(["attention"], attention)]),
        vllm_config=VllmConfig(),
        get_manager=lambda: manager,
    )


@contextmanager
def node_rig(num_rows: int, folder: Path, layout: str = "slab") -> Iterator[Rig]:
    """SpillwayRig with the CPU tier of a node, which no other engine uses."""
    with memory_folder() as memory:
        node = NodeRegion(memory, num_rows, ROW_BYTES, new_number())
        tier = make_node_tier(node, NODE_NAMESPACE, False)
        with _spillway_rig(num_rows, folder, layout, node.memory, tier) as rig:
            yield rig


def spillway_rig(num_rows: int, folder: Path, layout: str = "slab") -> AbstractContextManager[Rig]:
    region = unnamed_region(num_rows, ROW_BYTES)
    return _spillway_rig(num_rows, folder, layout, region, make_cpu_tier(num_rows, region, "lru", enable_events=False))


@contextmanager
def _spillway_rig(num_rows: int, folder: Path, layout: str, region: HostRegion, cpu_tier: CpuTier) -> Iterator[Rig]:
    hold = threading.Event()
    hold.set()
    geometry = SimpleNamespace(payload_bytes=ROW_BYTES, row_bytes=ROW_BYTES)
    spec = SimpleNamespace(
        geometry=geometry, namespace=Namespace.of({"bench": "scheduler_step"}), announces_blocks=False
    )
    options = {"path": str(folder / "nvme"), "mode": layout, "max_bytes": 1 << 28}
    options |= {name: FOREVER_SECONDS for name in ("lookup_timeout_seconds", "load_timeout_seconds")}
    open_tier = open_shared_tier.open_tier
    with patch.object(open_shared_tier, "open_tier", lambda *given: held(open_tier(*given), hold)):
        tier = SharedTierAdapter(spec, cpu_tier.get_kv_memoryview(), "nvme", **options)  # type: ignore[arg-type]
    manager = SpillwayTieringManager(
        cpu_tier,
        [tier],
        num_rows,
        ConnectorConfig.parse(
            {"num_cpu_blocks": num_rows, "request_wait_seconds": FOREVER_SECONDS, "prefill_tokens_per_second": 1.0}
        ),
        chunk_tokens=BLOCK_TOKENS,
        chunk_bytes=ROW_BYTES,
    )
    rig = SpillwayRig(SpillwayConnectorScheduler(fake_spec(manager, num_rows)), region, hold)  # type: ignore[arg-type]
    try:
        yield rig
    finally:
        rig.close()


@contextmanager
def upstream_rig(num_rows: int, folder: Path) -> Iterator[Rig]:
    region = unnamed_region(num_rows, ROW_BYTES)
    hold = threading.Event()
    hold.set()
    load_block = fs_manager.load_block

    def held_load(*given: object) -> object:
        hold.wait()
        return load_block(*given)

    mapper = SimpleNamespace(
        get_file_name=lambda key: f"{folder}/fs/{key[:1].hex()}/{key.hex()}.bin",
        get_config_file_path=lambda: f"{folder}/fs/config.json",
        get_run_config=dict,
    )
    cpu_tier = CPUPrimaryTierOffloadingManager(num_rows, region)  # type: ignore[arg-type]
    with (
        patch.object(fs_manager, "load_block", held_load),
        patch.object(fs_manager.FileMapper, "from_offloading_spec", lambda **_: mapper),
    ):
        spec = SimpleNamespace(block_size_factor=1)
        tier = fs_manager.FileSystemTierManager(spec, cpu_tier.get_kv_memoryview(), "fs", str(folder / "fs"))
        manager = TieringOffloadingManager(cpu_tier, [tier])
        rig = UpstreamRig(OffloadingConnectorScheduler(fake_spec(manager, num_rows)), region, hold)  # type: ignore[arg-type]
        try:
            yield rig
        finally:
            rig.close()


class Scenario(ABC):
    """`prepare` once; then, per step, `before` (not measured), `arrive` of each of `coming`, and `run`."""

    def __init__(self, rig: Rig, requests: int, chunks: int) -> None:
        self.rig, self.requests, self.chunks = rig, requests, chunks // requests
        self.waiting: list[BenchRequest] = []
        self.coming: list[BenchRequest] = []
        self.next_prompt = 1_000_000

    layout = "slab"  # of the NVMe tier
    upstream = True  # whether it also runs on upstream's manager

    @abstractmethod
    def prepare(self) -> None: ...

    def before(self) -> None:
        self.coming = []
        self.rig.before_step()

    def arrive(self, request: BenchRequest) -> None:
        self.rig.register(request)
        self.rig.ask(request)

    def run(self) -> None:
        for request in self.waiting:
            self.rig.ask(request)
        self.rig.end_step()

    def wait_for(self, prompts: Sequence[int]) -> None:
        self.waiting = [self.rig.make_request(prompt, self.chunks) for prompt in prompts]
        for request in self.waiting:
            self.arrive(request)


class Ready(Scenario):
    def prepare(self) -> None:
        self.rig.fill(range(self.requests), self.chunks)
        self.wait_for(range(self.requests))


class Pending(Scenario):
    """The chunks are in the shared tier only, whose answers are held back."""

    def prepare(self) -> None:
        self.rig.fill(range(self.requests), self.chunks)
        self.rig.scheduler.reset_cache()
        self.rig.step()
        self.rig.hold.clear()
        self.wait_for(range(self.requests))


class Promotions(Scenario):
    """Four times as many prompts as the CPU tier holds take turns. All that the shared tier does, it does between two
    steps, so every step is alike whatever the machine does."""

    def prepare(self) -> None:
        self.prompts = 8 * self.requests
        self.rig.fill(range(self.prompts), self.chunks)
        self.turn = 0
        self.leaving: list[BenchRequest] = []

    def before(self) -> None:
        self.rig.await_jobs()
        super().before()
        self.coming = [self.rig.make_request(self.turn % self.prompts, self.chunks)]
        self.turn += 1

    def run(self) -> None:
        for request in self.leaving:
            self.rig.finish(request)
        self.leaving, waiting = [], self.waiting
        self.waiting = [*self.coming]
        for request in waiting:
            tokens = self.rig.ask(request)
            if tokens is None:
                self.waiting.append(request)
            else:
                if tokens:
                    self.rig.start_load(request, tokens)
                self.leaving.append(request)
        self.rig.end_step()


class Stores(Ready):
    """Two new chunks are computed, and as many stored in the shared tier, per step: 64,000 tokens/s at 4 ms a step."""

    def before(self) -> None:
        self.rig.await_jobs()
        self.computed = self.coming
        self.next_prompt += 1
        self.coming = [self.rig.make_request(self.next_prompt, 2)]
        self.rig.before_step(self.coming)

    def run(self) -> None:
        for request in self.computed:
            self.rig.finish(request)
        super().run()


class Misses(Scenario):
    """One new prompt a step; the oldest waiting one has its answer by then and finishes."""

    def prepare(self) -> None:
        pass

    def before(self) -> None:
        super().before()
        self.next_prompt += 1
        self.coming = [self.rig.make_request(self.next_prompt, self.chunks)]

    def run(self) -> None:
        super().run()
        self.waiting += self.coming
        if len(self.waiting) == self.requests:
            self.rig.finish(self.waiting.pop(0))


class Decode(Scenario):
    running_requests = 64

    def prepare(self) -> None:
        self.running = [self.rig.make_request(prompt, 2) for prompt in range(self.running_requests)]
        for request in self.running:
            self.arrive(request)
        self.rig.step(self.running)
        for request in self.running:
            request.num_computed_tokens = request.num_tokens
        self.rig.settle()

    def before(self) -> None:
        for request in self.running:
            request.num_computed_tokens = request.num_tokens
            request.num_tokens += 1
        self.rig.before_step(decoding=self.running)


class DecodeFew(Decode):
    running_requests = 8


class Answers(Scenario):
    """One batch of look-ups of all requests is answered at once; requests with an answer finish, then all look up
    again."""

    layout = "files"  # a slab's index answers without a background look-up
    upstream = False

    def prepare(self) -> None:
        self.chunks = ANSWER_CHUNKS

    def before(self) -> None:
        if not self.waiting:
            self.rig.hold.clear()
            self.wait_for(range(self.next_prompt, self.next_prompt + ANSWER_REQUESTS))
            self.next_prompt += ANSWER_REQUESTS
            self.rig.step()
            shared = self.rig.scheduler.manager._shared_tiers[0]._shared
            shared.wait_for_progress(0.0)
            self.rig.hold.set()
            assert shared.wait_for_progress(60.0)
        super().before()

    def run(self) -> None:
        waiting, self.waiting = self.waiting, []
        for request in waiting:
            if self.rig.ask(request) is None:
                self.waiting.append(request)
            else:
                self.rig.finish(request)
        self.rig.end_step()


KINDS: dict[str, type[Scenario]] = {
    "ready": Ready,
    "pending": Pending,
    "promotions": Promotions,
    "stores": Stores,
    "misses": Misses,
    "decode_8": DecodeFew,
    "decode": Decode,
    "answers": Answers,
}


class Steps(NamedTuple):
    count: int
    chunks: int
    requests: int


@dataclass
class Figures:
    """Microseconds: per step without arrivals, per arrival, and per step with everything."""

    step: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    all: list[float] = field(default_factory=list)
    all_wall: list[float] = field(default_factory=list)


def measure(name: str, rivals: Mapping[str, Callable[..., AbstractContextManager[Rig]]], steps: Steps) -> list[Figures]:
    """The figures of each rival. They take their steps in turns, so what else the machine does falls on all of them."""
    kind = KINDS[name]
    with ExitStack() as stack:
        scenarios: list[Scenario] = []
        for rival, make_rig in rivals.items():
            folder = Path(tempfile.mkdtemp(prefix="spillway-bench-step-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            layout = {} if rival == "upstream" else {"layout": kind.layout}
            rig = stack.enter_context(make_rig(2 * steps.chunks, folder, **layout))
            scenarios.append(kind(rig, steps.requests, steps.chunks))
            scenarios[-1].prepare()
        all_figures = [Figures() for _ in scenarios]
        gc.collect()
        gc.freeze()
        for number in range(WARM_STEPS + steps.count):
            for scenario, figures in zip(scenarios, all_figures, strict=True):
                scenario.before()
                begun, begun_cpu = time.perf_counter_ns(), time.thread_time_ns()
                for request in scenario.coming:
                    scenario.arrive(request)
                came_cpu = time.thread_time_ns()
                scenario.run()
                ended_cpu, ended = time.thread_time_ns(), time.perf_counter_ns()
                if number >= WARM_STEPS:
                    figures.step.append((ended_cpu - came_cpu) / 1000)
                    if scenario.coming:  # one at most
                        figures.new.append((came_cpu - begun_cpu) / 1000)
                    figures.all.append((ended_cpu - begun_cpu) / 1000)
                    figures.all_wall.append((ended - begun) / 1000)
                time.sleep(PAUSE_SECONDS)
    return all_figures


def time_fixed_loop(steps: int) -> list[float]:
    """CPU microseconds, sorted, of the same work in every step."""
    table = {number.to_bytes(36, "big"): number for number in range(1000)}
    keys = list(table)
    microseconds = []
    for number in range(WARM_STEPS + steps):
        total, begun = 0, time.thread_time_ns()
        for key in keys:
            total += table[key]
        ended = time.thread_time_ns()
        if number >= WARM_STEPS:
            microseconds.append((ended - begun) / 1000)
        time.sleep(PAUSE_SECONDS)
    return sorted(microseconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What offload costs the scheduler's thread in a step.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--chunks", type=int, default=1000, help="in play, all waiting requests together")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--only", default=",".join(SCENARIOS), help=f"of {','.join(SCENARIOS)}")
    parser.add_argument("--rivals", default="spillway,upstream", help="of spillway,node,upstream")
    given = parser.parse_args(arguments)
    rivals: dict[str, Callable[..., AbstractContextManager[Rig]]]
    rivals = {"spillway": spillway_rig, "node": node_rig, "upstream": upstream_rig}
    report: dict[str, float] = {
        "chunks_in_play": given.chunks,
        "waiting_requests": given.requests,
        "steps": given.steps,
        "load_average": os.getloadavg()[0],
    }
    load = report["load_average"]
    print(f"{given.chunks} chunks of {given.requests} waiting requests, {given.steps} steps; load average {load:.1f}")
    widths = (10, 9, 10, 9, 10, 9, 9, 10, 9)
    heads = ("step p50", "p99", "new p50", "p99", "all p50", "p99", "max", "wall p50", "p99")
    print(f"{'CPU microseconds':24}" + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
    loop = time_fixed_loop(given.steps)
    report["fixed_loop_cpu_p50_microseconds"] = round(statistics.median(loop), 1)
    report["fixed_loop_cpu_p99_microseconds"] = round(loop[int(0.99 * len(loop))], 1)
    print(f"{'fixed loop':24}{statistics.median(loop):>10.1f}{loop[int(0.99 * len(loop))]:>9.1f}")
    for name in given.only.split(","):
        chosen = [one for one in given.rivals.split(",") if one != "upstream" or KINDS[name].upstream]
        steps = Steps(given.steps, given.chunks, given.requests)
        for rival, figures in zip(chosen, measure(name, {one: rivals[one] for one in chosen}, steps), strict=True):
            row = dict[str, float]()
            for label, values in (("step", figures.step), ("new", figures.new), ("all", figures.all)):
                values.sort()
                row[f"{label}_cpu_p50"] = statistics.median(values) if values else 0.0
                row[f"{label}_cpu_p99"] = values[int(0.99 * len(values))] if values else 0.0
            row["all_cpu_max"] = figures.all[-1]
            figures.all_wall.sort()
            row["all_wall_p50"] = statistics.median(figures.all_wall)
            row["all_wall_p99"] = figures.all_wall[int(0.99 * len(figures.all_wall))]
            cells = (f"{figure:>{width}.1f}" for figure, width in zip(row.values(), widths, strict=True))
            print(f"{name + ' ' + rival:24}" + "".join(cells), flush=True)
            for kind, figure in row.items():
                report[f"{name}_{rival}_{kind}_microseconds"] = round(figure, 1)
    write_report(report, OUTPUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
