"""What KV offload costs the scheduler's thread in one engine step, with a thousand chunks in play.

    python bench/scheduler_step.py [--steps 2000] [--chunks 1000] [--requests 8] [--only ready,misses]

vLLM's scheduler asks its KV connector about every waiting request in every step, on the thread that everything else
waits for. This drives our connector's scheduler half with a real CPU tier and a real NVMe tier, and upstream's
(`TieringOffloadingManager` with its `fs` tier), through the same steps: look up every waiting request, build the step's
metadata, take in what the workers report, collect statistics. Chunks are 4 KiB, so that the disk does not matter.

    ready       every chunk is in the CPU tier, and the device has no room: asked again and again
    pending     every chunk waits for the shared tier
    promotions  requests come, their chunks are loaded from the shared tier, and they go
    stores      a request is computed and stored in every step, while the others wait as in `ready`
    misses      requests that nobody has seen before come and go

Wall time is what the engine loses, other processes of this machine included; CPU time is what this thread did. A step's
threads get 2 ms afterwards, as an engine's do while the model runs. Writes build/bench/scheduler_step.json (flat; units
are in the keys).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.tiering.fs import manager as fs_manager
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from vllm.v1.outputs import KVConnectorOutput

from spillway_connector.config import ConnectorConfig
from spillway_connector.device.host_region import HostRegion, region_path
from spillway_connector.engine import tier_adapter
from spillway_connector.engine.cpu_tier import make_cpu_tier
from spillway_connector.engine.scheduler import SpillwayConnectorScheduler
from spillway_connector.engine.tiering import SpillwayTieringManager
from spillway_connector.engine.worker import SpillwayWorkerMetadata
from spillway_connector.namespace import Namespace
from spillway_connector.tiers.tier import Tier

BLOCK_TOKENS, ROW_BYTES = 128, 4096
WARM_STEPS = 100
PAUSE_SECONDS = 0.002
FOREVER_SECONDS = 3600.0
SCENARIOS = ("ready", "pending", "promotions", "stores", "misses")
OUTPUT = Path("build/bench/scheduler_step.json")


class BenchRequest(SimpleNamespace):
    """As much of vLLM's Request as the connector reads; its chunks are named by `prompt`."""

    def __init__(self, request_id: str, prompt: int, chunks: int) -> None:
        super().__init__(
            request_id=request_id,
            kv_transfer_params=None,
            cache_salt=None,
            block_hashes=[prompt.to_bytes(8, "big") * 3 + number.to_bytes(8, "big") for number in range(chunks)],
            num_tokens=chunks * BLOCK_TOKENS + 1,
            num_prompt_tokens=chunks * BLOCK_TOKENS + 1,
            num_computed_tokens=0,
            finished=False,
        )

    def is_finished(self) -> bool:
        return bool(self.finished)


class Rig:
    """One scheduler half on real tiers in `folder`, and the steps of an engine around it."""

    metadata: type[OffloadingWorkerMetadata]

    def __init__(self, scheduler: OffloadingConnectorScheduler, region: HostRegion, hold: threading.Event) -> None:
        self.scheduler = scheduler
        self.hold = hold  # while clear, the shared tier answers nothing
        self._region = region
        self._names = 0
        self._done: dict[int, int] = {}

    def request(self, prompt: int, chunks: int) -> BenchRequest:
        self._names += 1
        request = BenchRequest(f"request-{self._names}", prompt, chunks)
        self.scheduler.on_new_request(request)
        return request

    def ask(self, request: BenchRequest) -> int | None:
        tokens: int | None = self.scheduler.get_num_new_matched_tokens(request, 0)[0]
        return tokens

    def step(self, computed: Sequence[BenchRequest] = ()) -> None:
        """The rest of a step in which `computed` were prefilled; the workers copy at once."""
        blocks = {request.request_id: list(range(1, len(request.block_hashes) + 1)) for request in computed}
        scheduled = {request.request_id: request.num_tokens for request in computed}
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=(ids,)) for name, ids in blocks.items()],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids=None,
            finished_req_ids=set(),
        )
        done, self._done = self._done, {}
        meta = self.scheduler.build_connector_meta(output)
        self._done = dict.fromkeys([*meta.store_jobs, *meta.load_jobs], 1)  # told to the next step
        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=self.metadata(done)))
        self.statistics()

    def statistics(self) -> None:
        """Upstream's scheduler half has none."""

    def start_load(self, request: BenchRequest, tokens: int) -> None:
        blocks = [KVCacheBlock(number) for number in range(1, len(request.block_hashes) + 1)]
        self.scheduler.update_state_after_alloc(request, KVCacheBlocks((blocks,)), tokens)

    def finish(self, request: BenchRequest) -> None:
        request.finished = True
        self.scheduler.request_finished(request)

    def fill(self, prompts: Sequence[int], chunks: int) -> None:
        """Compute the prompts, so that both tiers hold them."""
        for prompt in prompts:
            request = self.request(prompt, chunks)
            self.ask(request)
            self.step([request])
            self.step()
            self.finish(request)
        self.settle()

    def settle(self) -> None:
        """Step until no job of the shared tier is under way."""
        until = time.monotonic() + 60.0
        while self.scheduler.manager._transfer_jobs:
            if time.monotonic() > until:
                raise RuntimeError("the shared tier did not end its jobs within 60 s")
            time.sleep(PAUSE_SECONDS)
            self.step()

    def close(self) -> None:
        self.hold.set()
        self.scheduler.shutdown()
        self._region.cleanup()


class SpillwayRig(Rig):
    metadata = SpillwayWorkerMetadata

    def statistics(self) -> None:
        self.scheduler.manager.take_stats()


class UpstreamRig(Rig):
    metadata = OffloadingWorkerMetadata


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
    if hasattr(tier, "contains_now"):
        answer = tier.contains_now
        tier.contains_now = lambda keys: answer(keys) if hold.is_set() else None
    return tier


def fake_spec(manager: object, num_rows: int) -> SimpleNamespace:
    group = SimpleNamespace(
        kv_cache_spec=FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    )
    return SimpleNamespace(
        gpu_block_size=(BLOCK_TOKENS,),
        hash_block_size=BLOCK_TOKENS,
        block_size_factor=1,
        offload_prompt_only=True,
        num_blocks=num_rows,
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=1), cache_config=SimpleNamespace(enable_prefix_caching=True)
        ),
        get_manager=lambda: manager,
    )


@contextmanager
def spillway_rig(num_rows: int, folder: Path) -> Iterator[Rig]:
    region = HostRegion(region_path(f"bench-step-{os.getpid()}"), num_rows, ROW_BYTES)
    region.unlink_name()
    hold = threading.Event()
    hold.set()
    cpu_tier = make_cpu_tier(num_rows, region, "lru", enable_events=False)
    geometry = SimpleNamespace(payload_bytes=ROW_BYTES, row_bytes=ROW_BYTES)
    spec = SimpleNamespace(geometry=geometry, namespace=Namespace.of({"bench": "scheduler_step"}))
    options = {"path": str(folder / "nvme"), "mode": "slab", "max_bytes": 1 << 28}
    options |= {name: FOREVER_SECONDS for name in ("lookup_timeout_seconds", "load_timeout_seconds")}
    open_tier = tier_adapter.open_tier
    with patch.object(tier_adapter, "open_tier", lambda *given: held(open_tier(*given), hold)):
        tier = tier_adapter.SharedTierAdapter(spec, cpu_tier.get_kv_memoryview(), "nvme", **options)  # type: ignore[arg-type]
    manager = SpillwayTieringManager(
        cpu_tier,
        [tier],
        num_rows,
        ConnectorConfig.parse(
            {"num_cpu_blocks": num_rows, "request_wait_seconds": FOREVER_SECONDS, "prefill_tokens_per_second": 1.0}
        ),
        enable_events=False,
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
    region = HostRegion(region_path(f"bench-step-upstream-{os.getpid()}"), num_rows, ROW_BYTES)
    region.unlink_name()
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


class Scenario:
    """`prepare` once, then `run` is one step; only what runs in it counts."""

    def __init__(self, rig: Rig, requests: int, chunks: int) -> None:
        self.rig, self.requests, self.chunks = rig, requests, chunks // requests
        self.waiting: list[BenchRequest] = []
        self.next_prompt = 1_000_000

    def prepare(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        for request in self.waiting:
            self.rig.ask(request)
        self.rig.step()

    def arrive(self, prompts: Sequence[int]) -> None:
        self.waiting += [self.rig.request(prompt, self.chunks) for prompt in prompts]


class Ready(Scenario):
    def prepare(self) -> None:
        self.rig.fill(range(self.requests), self.chunks)
        self.arrive(range(self.requests))


class Pending(Scenario):
    """The chunks are in the shared tier only; it holds its tongue."""

    def prepare(self) -> None:
        self.rig.fill(range(self.requests), self.chunks)
        self.rig.scheduler.reset_cache()
        self.rig.step()
        self.rig.hold.clear()
        self.arrive(range(self.requests))


class Promotions(Scenario):
    """Four times as many prompts as the CPU tier holds take turns; one whose chunks have come is loaded and leaves."""

    def prepare(self) -> None:
        self.prompts = 8 * self.requests
        self.rig.fill(range(self.prompts), self.chunks)
        self.turn = 0
        self.leaving: list[BenchRequest] = []

    def run(self) -> None:
        for request in self.leaving:
            self.rig.finish(request)
        if len(self.waiting) < self.requests:
            self.arrive([self.turn % self.prompts])
            self.turn += 1
        self.leaving, waiting = [], self.waiting
        self.waiting = []
        for request in waiting:
            tokens = self.rig.ask(request)
            if tokens is None:
                self.waiting.append(request)
            else:
                if tokens:
                    self.rig.start_load(request, tokens)
                self.leaving.append(request)
        self.rig.step()


class Stores(Ready):
    """Two new chunks are computed, and as many copied on, per step: 64,000 tokens/s at 4 ms a step."""

    def prepare(self) -> None:
        super().prepare()
        self.computed: list[BenchRequest] = []

    def run(self) -> None:
        for request in self.computed:
            self.rig.finish(request)
        self.next_prompt += 1
        request = self.rig.request(self.next_prompt, 2)
        self.rig.ask(request)
        for waiting in self.waiting:
            self.rig.ask(waiting)
        self.rig.step([request])
        self.computed = [request]


class Misses(Scenario):
    """One new prompt a step; the oldest of those that wait is answered by then and leaves."""

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        self.next_prompt += 1
        self.arrive([self.next_prompt])
        for request in self.waiting:
            self.rig.ask(request)
        self.rig.step()
        if len(self.waiting) == self.requests:
            self.rig.finish(self.waiting.pop(0))


KINDS: dict[str, type[Scenario]] = {
    "ready": Ready,
    "pending": Pending,
    "promotions": Promotions,
    "stores": Stores,
    "misses": Misses,
}


def measure(name: str, make_rig: Callable[..., object], given: argparse.Namespace) -> tuple[list[float], list[float]]:
    """(wall, CPU) microseconds of each step."""
    wall, cpu = [], []
    folder = Path(tempfile.mkdtemp(prefix="spillway-bench-step-"))
    try:
        with make_rig(2 * given.chunks, folder) as rig:  # type: ignore[attr-defined]
            scenario = KINDS[name](rig, given.requests, given.chunks)
            scenario.prepare()
            gc.collect()
            gc.freeze()
            for number in range(WARM_STEPS + given.steps):
                begun, begun_cpu = time.perf_counter_ns(), time.thread_time_ns()
                scenario.run()
                ended_cpu, ended = time.thread_time_ns(), time.perf_counter_ns()
                if number >= WARM_STEPS:
                    wall.append((ended - begun) / 1000)
                    cpu.append((ended_cpu - begun_cpu) / 1000)
                time.sleep(PAUSE_SECONDS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return wall, cpu


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What offload costs the scheduler's thread in a step.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--chunks", type=int, default=1000, help="in play, all waiting requests together")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--only", default=",".join(SCENARIOS), help=f"of {','.join(SCENARIOS)}")
    parser.add_argument("--rivals", default="spillway,upstream")
    given = parser.parse_args(arguments)
    rivals = {"spillway": spillway_rig, "upstream": upstream_rig}
    report: dict[str, float] = {
        "chunks_in_play": given.chunks,
        "waiting_requests": given.requests,
        "steps": given.steps,
    }
    print(f"{given.chunks} chunks of {given.requests} waiting requests, {given.steps} steps; microseconds per step\n")
    print(f"{'':24}{'wall p50':>10}{'wall p99':>10}{'CPU p50':>10}{'CPU p99':>10}{'CPU max':>10}")
    for name in given.only.split(","):
        for rival in given.rivals.split(","):
            wall, cpu = (sorted(figures) for figures in measure(name, rivals[rival], given))
            figures = {
                "wall_p50": statistics.median(wall),
                "wall_p99": wall[int(0.99 * len(wall))],
                "cpu_p50": statistics.median(cpu),
                "cpu_p99": cpu[int(0.99 * len(cpu))],
                "cpu_max": cpu[-1],
            }
            print(f"{name + ' ' + rival:24}" + "".join(f"{figure:>10.1f}" for figure in figures.values()), flush=True)
            for kind, figure in figures.items():
                report[f"{name}_{rival}_{kind}_microseconds"] = round(figure, 1)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwritten to {OUTPUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
