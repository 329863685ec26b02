"""What an engine pod is told: the chart's values under `engine:` in snake case. Each default is written here, once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from spillway_engine.bounds import require_at_least
from spillway_engine.byte_sizes import ByteCount
from spillway_engine.door import FILE, Door
from spillway_engine.errors import SettingsError
from spillway_engine.extra_arguments import check_extra_arguments
from spillway_engine.likelihood import TEXT_CHARACTERS_MAX, TEXT_CHARACTERS_MIN
from spillway_engine.tier_settings import SharedTierSettings, check_shared_tier, refuse_credentials


@dataclass(frozen=True, slots=True)
class ModelSettings:
    path: str  # a folder with config.json, or a hub name
    served_name: str = ""  # empty: the last part of `path`
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_length: int = 8192  # tokens, prompt and answer together
    seed: int = 0


@dataclass(frozen=True, slots=True)
class KvEventsSettings:
    enabled: bool = True
    port: int = 8200
    replay_port: int = 8300


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    enabled: bool = True
    num_cpu_blocks: int | None = None  # chunks of the whole replica
    cpu_bytes: ByteCount | None = None  # the same said in bytes; one of the two
    blocks_per_chunk: int = 1
    eviction_policy: Literal["lru", "arc"] = "lru"
    batch_memcpy: Literal["auto", "on", "off"] = "auto"
    max_copy_descriptors: int = 4096  # pieces of one batched copy
    transport: Literal["auto", "cpu", "npu", "cuda"] = "auto"  # by platform; naming one is for tests
    acl_library_path: str | None = None  # None: libascendcl.so, where CANN's set_env.sh put it
    cuda_library_path: str | None = None  # None: libcuda.so.1 of the driver
    copy_table: dict[str, Any] | None = None  # CUDA: which way which sizes go, as make bench-copy prints it
    weights_version: str | None = None  # another one, another namespace: nothing computed before is hit
    # The connector loads only while that beats recomputing; a number here replaces the prefill rate that it measures.
    prefill_tokens_per_second: float | None = None
    request_wait_seconds: float = 3.0  # over all lookups and loads of one request; then it recomputes
    # Loads from the shared tier may hold this share of the CPU tier: all at once, and those of one request.
    promotion_in_flight_fraction: float = 0.5
    promotion_per_request_fraction: float = 0.75
    shared_tier: SharedTierSettings = field(default_factory=SharedTierSettings)
    extra_tiers: tuple[
        dict[str, Any], ...
    ] = ()  # further secondary tiers of vLLM, passed on unread, after the shared tier


@dataclass(frozen=True, slots=True)
class LifecycleSettings:
    drain_delay_seconds: float = 5.0  # between "not ready" and refusing work: time for routers to notice
    drain_timeout_seconds: float = 60.0  # then time for running requests
    stop_timeout_seconds: float = 20.0  # then time for vLLM to end before the whole process group is killed
    self_check: Literal["auto", "off"] = "auto"
    self_check_text: str = ""  # sentences that the model knows well; empty: the built-in ones, in English
    self_check_timeout_seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class EngineSettings:
    model: ModelSettings
    name: str = "engine-0"
    host: str = "127.0.0.1"
    port: int = 8100
    block_size: int = 128  # tokens
    device_blocks: int | None = None
    tensor_parallel_size: int = 1
    platform: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    kv_events: KvEventsSettings = field(default_factory=KvEventsSettings)
    offload: OffloadSettings = field(default_factory=OffloadSettings)
    lifecycle: LifecycleSettings = field(default_factory=LifecycleSettings)
    extra_args: tuple[str, ...] = ()
    extra_env: dict[str, str] = field(default_factory=dict)
    door: Door = FILE  # what all of these are called where a person set them

    @property
    def served_name(self) -> str:
        return self.model.served_name or self.model.path.rstrip("/").rsplit("/", 1)[-1]


def check_settings(settings: EngineSettings) -> EngineSettings:
    """Refuse contradictions that need no look at the machine. Returns the settings unchanged.

    Raises SettingsError with what to change.
    """
    _check_numbers(settings)
    _check_ports(settings)
    _check_text(settings)
    offload, door = settings.offload, settings.door
    check_extra_arguments(settings.extra_args, door)
    refuse_credentials(offload.shared_tier, offload.extra_tiers, door)
    if offload.enabled:
        if offload.num_cpu_blocks is not None and offload.cpu_bytes is not None:
            raise SettingsError(
                f"{door.given('offload.numCpuBlocks', offload.num_cpu_blocks)} and "
                f"{door.given('offload.cpuBytes', offload.cpu_bytes)} are both set; they say the same thing twice, "
                "remove one"
            )
        if offload.num_cpu_blocks is None and offload.cpu_bytes is None:
            raise SettingsError(
                f"{door.given('offload.enabled', True)} needs the size of the CPU tier; set "
                f"{door.name('offload.numCpuBlocks')} (or {door.name('offload.cpuBytes')}), "
                f"or {door.given('offload.enabled', False)}"
            )
        check_shared_tier(offload.shared_tier, door)
    return settings


def _check_numbers(settings: EngineSettings) -> None:
    at_least: list[tuple[str, float | None, float]] = [
        ("model.maxLength", settings.model.max_length, 1),
        ("blockSize", settings.block_size, 16),
        ("deviceBlocks", settings.device_blocks, 2),
        ("tensorParallelSize", settings.tensor_parallel_size, 1),
        ("offload.numCpuBlocks", settings.offload.num_cpu_blocks, 1),
        ("offload.cpuBytes", settings.offload.cpu_bytes, 1),
        ("offload.blocksPerChunk", settings.offload.blocks_per_chunk, 1),
        ("offload.maxCopyDescriptors", settings.offload.max_copy_descriptors, 1),
        ("offload.prefillTokensPerSecond", settings.offload.prefill_tokens_per_second, 0.001),
        ("offload.requestWaitSeconds", settings.offload.request_wait_seconds, 0.001),
        ("lifecycle.drainDelaySeconds", settings.lifecycle.drain_delay_seconds, 0),
        ("lifecycle.drainTimeoutSeconds", settings.lifecycle.drain_timeout_seconds, 0),
        ("lifecycle.stopTimeoutSeconds", settings.lifecycle.stop_timeout_seconds, 1),
        ("lifecycle.selfCheckTimeoutSeconds", settings.lifecycle.self_check_timeout_seconds, 1),
    ]
    door = settings.door
    require_at_least(at_least, door)
    for key, fraction in (
        ("offload.promotionInFlightFraction", settings.offload.promotion_in_flight_fraction),
        ("offload.promotionPerRequestFraction", settings.offload.promotion_per_request_fraction),
    ):
        if not 0.0 < fraction <= 1.0:
            raise SettingsError(
                f"{door.given(key, fraction)} is no share of the CPU tier; set it above 0 and to 1 at most"
            )
    if settings.block_size % 16:
        raise SettingsError(
            f"{door.given('blockSize', settings.block_size)} is not a multiple of 16, as attention kernels need; "
            "128 suits every platform"
        )
    if not settings.model.path:
        raise SettingsError(f"{door.name('model.path')} is empty; set it to a model folder or a hub name")


def _check_text(settings: EngineSettings) -> None:
    text, door = settings.lifecycle.self_check_text, settings.door
    if text and not TEXT_CHARACTERS_MIN <= len(text) <= TEXT_CHARACTERS_MAX:
        raise SettingsError(
            f"{door.name('lifecycle.selfCheckText')} has {len(text)} characters; give {TEXT_CHARACTERS_MIN} to "
            f"{TEXT_CHARACTERS_MAX}: one or two sentences that the model knows well"
        )


def _check_ports(settings: EngineSettings) -> None:
    ports = {"port": settings.port}
    if settings.kv_events.enabled:
        ports |= {"kvEvents.port": settings.kv_events.port, "kvEvents.replayPort": settings.kv_events.replay_port}
    door = settings.door
    holders: dict[int, str] = {}
    for key, port in ports.items():
        if not 1 <= port <= 65_535:
            raise SettingsError(f"{door.given(key, port)} is no TCP port; choose one from 1 to 65535")
        if port in holders:
            raise SettingsError(f"{door.given(key, port)} is also {door.name(holders[port])}; give each its own port")
        holders[port] = key
