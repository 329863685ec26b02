"""One soak of one tier: record the answers, start the stack, load and disturb it, let it settle, take it down."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import httpx
from stack_driver.deadlines import eventually
from stack_driver.engine_client import EngineClient
from stack_driver.engine_processes import shared_memory_of, vllm_group
from stack_driver.footprint import Footprint
from stack_driver.running_stack import RunningStack, stack_settings

from soak.cache_faults import CacheFaults
from soak.counters import Counters, read_metrics
from soak.engine_faults import EngineFaults
from soak.folder_faults import FolderFaults
from soak.footprints import Footprints
from soak.lanes import Lanes, StoreFaults
from soak.load import Load, new_client
from soak.outages import GATEWAY, Outages
from soak.references import PlainEngine, Pool, learn_pool
from soak.report import Observed
from soak.schedule import engine_faults, reset_faults, store_faults
from soak.valkey_faults import ValkeyFaults
from spillway_stack.local_stack import LocalStack
from spillway_stack.settings import StackSettings

# All of them small, so that the pool of prompts fits nowhere whole: device, CPU tier and shared tier all evict.
DEVICE_BLOCKS, CPU_BLOCKS = 28, 24
MAX_TOKENS = 1024
SAMPLE_SECONDS = 5.0
QUIET_SHARE = 0.05  # of the time, at the end: the last faults heal under load
ENGINES = 2
VALKEY_OWN_BYTES = 16 << 20  # buffers of clients and the keys


@dataclass(frozen=True, slots=True)
class SoakSettings:
    tier: str
    seconds: float
    seed: int
    clients: int
    prompts: int
    dtype: str
    inject_wrong: bool = False
    nvme_mode: str = "auto"
    shared_blocks: int = 32  # of the shared tier
    reset_seconds: float = 5.0  # between resets of an engine's caches, on average; 0: none


def learn_references(settings: SoakSettings, say: Callable[[str], None]) -> Pool:
    say(f"learning the answers to {settings.prompts} prompts on an engine without offload")
    with _stack("off", settings, engines=1, gateway=False) as stack:
        engine = PlainEngine(stack.local.engines[0].url, stack.model)
        try:
            pool = learn_pool(engine, settings.prompts, settings.seed)
        finally:
            engine.close()
    say(
        f"{len(pool.references)} prompts, whose log-probabilities move by up to {pool.noise:.2g} of themselves; "
        f"another block changes the answer of {pool.sensitive_prompts}"
    )
    return pool


def soak(settings: SoakSettings, pool: Pool, stopped: threading.Event, say: Callable[[str], None]) -> Observed:
    """Ends early, and in order, when `stopped` is set."""
    with _stack(settings.tier, settings, engines=ENGINES, gateway=True) as stack:
        say(f"{settings.tier}: the stack is up")
        observed, footprint = _disturb(stack, settings, pool, stopped, say)
    return replace(observed, leftovers=[*observed.leftovers, *footprint.left()])


def _disturb(
    stack: RunningStack, settings: SoakSettings, pool: Pool, stopped: threading.Event, say: Callable[[str], None]
) -> tuple[Observed, Footprint]:
    urls = {handle.name: handle.url for handle in stack.local.engines}
    outages = Outages((*urls, GATEWAY))
    block_bytes = stack.block_bytes
    store: StoreFaults = (
        FolderFaults(stack)
        if settings.tier == "nvme"
        else ValkeyFaults(stack, settings.shared_blocks * block_bytes + VALKEY_OWN_BYTES)
    )
    engine_lane = EngineFaults(stack, outages)
    load = Load(
        pool.references,
        urls,
        stack.local.gateway_url,
        stack.model,
        outages,
        seed=settings.seed,
        clients=settings.clients,
        inject_wrong=settings.inject_wrong,
    )
    lanes = Lanes(
        settings.seconds,
        outages,
        urls,
        strike_engine=engine_lane.strike,
        strike_caches=CacheFaults(urls, outages).strike,
        store=store,
        say=say,
    )
    watch = _Watch(stack, urls)
    begun = time.monotonic()
    load.start()
    lanes.start(
        store_faults(settings.seed, settings.tier),
        engine_faults(settings.seed, settings.tier, ENGINES),
        reset_faults(settings.seed, settings.tier, ENGINES, settings.reset_seconds),
    )
    try:
        quiet_at = begun + settings.seconds * (1 - QUIET_SHARE)
        while time.monotonic() < quiet_at and not stopped.is_set():
            stopped.wait(SAMPLE_SECONDS)
            watch.sample(time.monotonic() - begun)
    finally:
        lanes.stop()
    while time.monotonic() < begun + settings.seconds and not stopped.is_set():
        stopped.wait(SAMPLE_SECONDS)
        watch.sample(time.monotonic() - begun)
    try:
        load.stop()
    except AssertionError as error:
        lanes.log.broken.append(str(error))
    if not stopped.is_set():
        _final_round(load, list(urls), pool, lanes, settings.clients)
    watch.sample(time.monotonic() - begun)
    left = [*engine_lane.left_shared_memory, *engine_lane.left_processes]
    observed = Observed(
        settings.tier,
        time.monotonic() - begun,
        block_bytes,
        pool,
        load.tally,
        lanes.log,
        watch.counters,
        watch.footprints,
        left,
    )
    eventually("every component is ready", lambda: all(status.ready for status in stack.local.status()), 300.0)
    footprint = Footprint.of(stack.local.folder)
    return observed, replace(footprint, shared_memory=footprint.shared_memory | watch.shared_memory)


def _final_round(load: Load, engines: list[str], pool: Pool, lanes: Lanes, clients: int) -> None:
    """Every prompt once more from each engine and the gateway, after the last fault was healed."""
    with new_client() as client, ThreadPoolExecutor(clients) as crowd:
        for target in (*engines, GATEWAY):
            answered = crowd.map(partial(load.ask, client, target=target), pool.references)
            silent = [one.prompt.name for one, there in zip(pool.references, answered, strict=True) if not there]
            if silent:
                lanes.log.broken.append(f"after the last fault {target} did not answer {silent}")


class _Watch:
    """Counters, footprints and the files of shared memory of the stack's engines, read now and then."""

    def __init__(self, stack: RunningStack, urls: dict[str, str]) -> None:
        self.counters, self.footprints = Counters(), Footprints()
        self.shared_memory: set[Path] = set()
        self._stack, self._urls = stack, urls
        self._http = httpx.Client()

    def sample(self, seconds: float) -> None:
        for name, url in self._urls.items():
            reading = read_metrics(self._http, url)
            if reading is not None:
                self.counters.add(name, reading)
        alive = [(status.name, status.identity) for status in self._stack.local.status()]
        running = [(name, identity) for name, identity in alive if identity is not None]
        self.footprints.sample(seconds, running)
        for name, identity in running:
            if name in self._urls:
                with suppress(AssertionError, OSError):  # an engine that is starting or ending
                    self.shared_memory |= shared_memory_of(vllm_group(identity))


@contextmanager
def _stack(tier: str, settings: SoakSettings, *, engines: int, gateway: bool) -> Iterator[RunningStack]:
    """Run a stack in a folder of its own, which is gone afterwards whatever happens, unless the block failed: then
    logs are kept."""
    folder = Path(tempfile.mkdtemp(prefix=f"spillway-soak-{tier}-"))
    local = LocalStack(_settings_of(tier, settings, engines=engines, gateway=gateway), folder)
    with local:
        eventually("every component is ready", lambda: all(status.ready for status in local.status()), 300.0)
        stack = RunningStack(tier, local)
        stack.engines = [EngineClient(handle.url, stack.model, tier) for handle in local.engines]
        try:
            yield stack
        finally:
            for engine in stack.engines:
                engine.close()
    shutil.rmtree(folder, ignore_errors=True)


def _settings_of(tier: str, settings: SoakSettings, *, engines: int, gateway: bool) -> StackSettings:
    usual = stack_settings(tier, engines=engines, gateway=gateway)
    # Its share for each of the engines that are busy at once, and the same for the one that records answers: more
    # threads than cores wait for each other at every step, far longer than they compute on a machine with other work.
    threads = max(1, (os.cpu_count() or 1) // ENGINES)
    overrides = (
        *usual.engine_overrides,
        'extraEnv.VLLM_CPU_OMP_THREADS_BIND="nobind"',
        f'extraEnv.OMP_NUM_THREADS="{threads}"',
        # The C library's default, but fixed: else it rises to the largest activation seen, and all of them lie on one
        # heap, whose fragmentation grows with every new mix of requests, by 50 MiB at once, also without offload.
        'extraEnv.MALLOC_MMAP_THRESHOLD_="131072"',
    )
    if tier == "nvme":
        overrides = (*overrides, f"offload.sharedTier.nvme.mode={settings.nvme_mode}")
    if settings.dtype != "auto":
        overrides = (*overrides, f"model.dtype={settings.dtype}")
    return replace(
        usual,
        num_cpu_blocks=CPU_BLOCKS,
        device_blocks=DEVICE_BLOCKS,
        max_length=MAX_TOKENS,
        nvme_max_bytes=settings.shared_blocks * _frame_bytes(settings.dtype),
        engine_overrides=overrides,
    )


def _frame_bytes(dtype: str) -> int:
    """A frame of the bundled model: 30 layers, 3 KV heads of 64, keys and values, 128 tokens; and a header page."""
    return 30 * 2 * 3 * 64 * 128 * (4 if dtype == "float32" else 2) + 4096
