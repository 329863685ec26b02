"""A started stack and everything a test asks of it."""

from __future__ import annotations

import itertools
import os
import random
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from spillway_stack import make_variables
from spillway_stack.engine_environments import VLLM_HERE, VLLM_VERSIONS
from spillway_stack.local_stack import ComponentStatus, LocalStack
from spillway_stack.ports import is_free
from spillway_stack.processes import ProcessIdentity
from spillway_stack.settings import StackSettings, vllm_versions

from .deadlines import eventually
from .engine_client import Answer, EngineClient
from .engine_metrics import Reading
from .known_answers import KnownAnswers, compute_references
from .prompts import BLOCK_TOKENS, Prompt, make_prompt
from .shared_stores import NvmeStore, SharedStore, ValkeyStore

# Small on purpose: a handful of prompts evicts one from the device.
DEVICE_BLOCKS = 48
CPU_BLOCKS = 64
NVME_MAX_BYTES = 12 << 30  # 200 prompts in float32 are half of it
MAX_LENGTH = 4096
# Length of a cold prompt's computation on this machine.
COLD_SECONDS = 1.2
BLOCKS_LEAST, BLOCKS_MOST = 4, 8
# A machine under test is busy, and so is its disk: with the default deadlines a hit or a store would be random. A tier
# that never answers costs each of these once.
PATIENCE = (
    "offload.sharedTier.lookupTimeoutSeconds=5",
    "offload.sharedTier.loadTimeoutSeconds=15",
    "offload.requestWaitSeconds=20",
    "offload.sharedTier.storeTimeoutSeconds=30",
    "offload.sharedTier.storeQueueSecondsMax=30",
)
# Nor may a slow disk make the engine decide that loading does not pay.
ALWAYS_LOAD = "offload.prefillTokensPerSecond=1"
# Streams finish within the drain time on a slow machine.
SLOW_DRAIN = "lifecycle.drainTimeoutSeconds=100"
# vLLM computes one batch of the largest size while it starts. vLLM's default of 4,096 tokens takes a slow machine ten
# seconds per start; this one still holds the longest prompt of BLOCKS_MOST.
BATCH = ("--max-num-batched-tokens", "1152")
# vLLM's endpoint for resetting caches exists in its development mode alone.
DEVELOPMENT_MODE = 'extraEnv.VLLM_SERVER_DEV_MODE="1"'


def stack_settings(
    tier: str,
    *,
    engines: int = 2,
    gateway: bool = True,
    model: str = "",
    overrides: tuple[str, ...] = (),
    vllm: tuple[str, ...] = (),
) -> StackSettings:
    """tier: "nvme", "redis", or "off" for engines without any offload. overrides: as StackSettings.engine_overrides.
    model: empty for the bundled one. vllm: as StackSettings.vllm; empty: as VLLM says.

    MODEL, VLLM, DTYPE, ENGINE_ARGS and ENGINE_SET, as `make up` takes them, run all stack tests on such engines, the
    references too.
    """
    return StackSettings(
        port=free_base_port(),
        engines=engines,
        model=os.environ.get("MODEL", "") or model,
        shared_tier="none" if tier == "off" else tier,
        offload=tier != "off",
        num_cpu_blocks=CPU_BLOCKS,
        device_blocks=DEVICE_BLOCKS,
        max_length=MAX_LENGTH,
        nvme_max_bytes=NVME_MAX_BYTES,
        gateway=gateway,
        dtype=os.environ.get("DTYPE", "auto"),
        vllm=vllm or vllm_versions(os.environ.get("VLLM", "")),
        engine_args=(*BATCH, *make_variables.arguments(os.environ)),
        engine_overrides=(
            DEVELOPMENT_MODE,
            SLOW_DRAIN,
            *make_variables.overrides(os.environ),
            *((*PATIENCE, ALWAYS_LOAD) if tier != "off" else ()),
            *overrides,
        ),
    )


def upgrade() -> tuple[str, str]:
    """(old, new) vLLM of a fleet in the middle of an upgrade: from this environment's to the one that VLLM names last,
    or to the newest."""
    asked = vllm_versions(os.environ.get("VLLM", ""))[-1]
    return VLLM_HERE, asked if asked != VLLM_HERE else VLLM_VERSIONS[-1]


def free_base_port() -> int:
    """A port whose whole family (see StackSettings) is free, below the range of outgoing connections."""
    for port in random.sample(range(11_000, 31_000, 10), 200):
        family = [port, port + 100, port + 101, port + 200, port + 201, port + 300, port + 301, port + 400]
        if all(is_free(member) for member in family):
            return port
    raise AssertionError("no free family of ports between 11000 and 31400")


@dataclass
class RunningStack:
    """`engines` are in order; `a` computes, `b` has not computed the same prompts unless a test does so. A stack of a
    single engine has it as both: after a reset of its caches only the shared tier holds the blocks."""

    tier: str
    local: LocalStack
    blocks: int = BLOCKS_LEAST  # of a usual prompt here
    engines: list[EngineClient] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @classmethod
    def start(cls, tier: str, folder: Path, **settings: Any) -> RunningStack:
        """settings: as stack_settings takes them."""
        local = LocalStack(stack_settings(tier, **settings), folder)
        local.__enter__()
        running = cls(tier, local)
        try:
            model = local.model.served_name
            running.engines = [EngineClient(handle.url, model, tier) for handle in local.engines]
            running._measure()
        except BaseException:
            running.close()
            raise
        return running

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.local.close()

    @property
    def a(self) -> EngineClient:
        return self.engines[0]

    @property
    def b(self) -> EngineClient:
        return self.engines[-1]

    @property
    def model(self) -> str:
        return self.local.model.served_name

    @property
    def store(self) -> SharedStore:
        if self.tier == "nvme":
            return NvmeStore(self.local.folder.nvme, self.local.settings.nvme_max_bytes)
        return ValkeyStore(self.local.valkey_url)

    def gateway_metrics(self) -> Reading:
        return Reading.parse(httpx.get(f"{self.local.gateway_url}/metrics", timeout=120).text)

    def compute_and_announce(self, index: int) -> Prompt:
        """Have an engine compute a new prompt; returns it once the gateway has applied the events of its blocks.

        Batches are applied in order, so one that was made later follows all of the prompt's. The first one behind the
        start of the prompt may hold announcements of the shared tier alone.
        """
        eventually("the gateway's slow start of engines is over", self._slow_start_is_over)
        engine, prompt = self.engines[index], self.new_prompt()
        engine.ask(prompt.tokens, 1)
        begun = time.time()  # of the clock that stamps batches
        engine.ask(self.new_prompt(1).tokens, 1)
        eventually("the gateway applies the new blocks' events", lambda: self._last_events_at(index) > begun)
        return prompt

    def _slow_start_is_over(self) -> bool:
        """Whether each engine counts at its full rate. Until then the longest prefix may be on the dearer engine, as
        ALWAYS_LOAD makes the few tokens behind it cost as much as seconds."""
        state = httpx.get(f"{self.local.gateway_url}/ui/state", timeout=120).json()
        return not any(engine["slowStart"] for model in state["models"] for engine in model["engines"])

    def _last_events_at(self, index: int) -> float:
        """Seconds since the epoch, by the engine's clock, of its last KV events that the gateway has applied."""
        name = f"engine-{index}"
        return self.gateway_metrics().total("spillway_gateway_event_last_batch_timestamp_seconds", engine=name)

    @property
    def block_bytes(self) -> int:
        return int(self.a.configuration()["memory"]["bytes_per_block"])

    def new_prompt(self, blocks: int | None = None) -> Prompt:
        """An unseen prompt."""
        return make_prompt(f"{self.tier} {next(self._numbers)}", blocks or self.blocks)

    def compute_and_store(self, engine: EngineClient, blocks: int | None = None) -> KnownAnswers:
        """Compute a new prompt; returns its answers once all its blocks are in the shared tier."""
        prompt = self.new_prompt(blocks)
        stored = self.stored()
        known = compute_references(engine, prompt)
        self.wait_stored(stored + prompt.blocks, engine)
        return known

    def stored(self) -> int:
        """Number of blocks in the shared tier once no engine has a pending store."""
        for engine in self.engines:
            eventually(f"{engine.url} has no pending stores", engine.has_settled, 120.0)
        return self.store.frames()

    def wait_stored(self, frames: int, engine: EngineClient) -> None:
        eventually(f"{frames} blocks in the {self.tier} tier", lambda: self.store.frames() >= frames, 120.0)
        engine.nudge()  # lets the engine collect the result and release the rows

    def ask_shared(self, engine: EngineClient, known: KnownAnswers) -> Answer:
        """Reset an engine's caches, ask it, and check the answer against the references."""
        engine.reset_prefix_cache(cpu_tier=True)
        answer = engine.ask(known.prompt.tokens)
        known.check(answer)
        return answer

    def wait_shared_tier_works(self, timeout_seconds: float = 180.0) -> None:
        """Wait until each engine reads what the other writes, after a fault."""

        def round_trip(writer: EngineClient, reader: EngineClient) -> bool:
            prompt = self.new_prompt(2)
            stored = self.stored()
            known = compute_references(writer, prompt)
            if self.stored() < stored + prompt.blocks:
                return False  # refused, or lost: the engine holds none of them any more
            reader.reset_prefix_cache(cpu_tier=True)
            answer = reader.ask(prompt.tokens)
            if answer.cached_tokens in known.by_cached_tokens:
                known.check(answer)
            # A half-open breaker lets only part of a prefix through.
            return (answer.source, answer.cached_tokens) == ("shared", prompt.reusable_tokens)

        for writer, reader in ((self.a, self.b), (self.b, self.a)):
            eventually(f"the {self.tier} tier is used again", partial(round_trip, writer, reader), timeout_seconds)

    def component(self, name: str) -> ComponentStatus:
        return next(status for status in self.local.status() if status.name == name)

    def process(self, name: str) -> ProcessIdentity:
        return eventually(f"{name} runs", lambda: self.component(name).identity)

    @property
    def supervisor(self) -> ProcessIdentity:
        state = self.local.folder.read_state()
        assert state is not None, "the stack was taken down"
        identity = ProcessIdentity.from_record(state["supervisor"])
        assert identity is not None
        return identity

    def _measure(self) -> None:
        # Warm-up.
        self.a.complete(make_prompt(f"{self.tier} first", 1).tokens, 1)
        probe = make_prompt(f"{self.tier} probe", BLOCKS_LEAST)
        begun = time.monotonic()
        self.a.complete(probe.tokens, 1)
        tokens_per_second = len(probe.tokens) / (time.monotonic() - begun)
        self.blocks = max(BLOCKS_LEAST, min(BLOCKS_MOST, int(tokens_per_second * COLD_SECONDS / BLOCK_TOKENS)))
