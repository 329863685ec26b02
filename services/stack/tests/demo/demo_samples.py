"""Samples as a run would collect them: 3 documents, 32 blocks of 128 tokens, 10 bytes of KV per token."""

from collections.abc import Mapping, Sequence

from spillway_stack.demo.asking import Answer
from spillway_stack.demo.engine_counters import EngineCounters
from spillway_stack.demo.phases import Phase, Sample, attribute
from spillway_stack.demo.report import Row, summarise
from spillway_stack.demo.sizing import EngineLimits

LIMITS = EngineLimits(
    max_length=8192, block_size=128, chunk_tokens=128, device_blocks=80, cpu_chunks=96, bytes_per_token=10
)
PROMPT_TOKENS = 4150
ENGINES = {Phase.OTHER_ENGINE: "engine-1"}
TTFT_SECONDS = {
    Phase.COLD: 4.0,
    Phase.DEVICE_HIT: 0.1,
    Phase.GATEWAY: 0.11,
    Phase.CPU_TIER: 0.4,
    Phase.OTHER_ENGINE: 0.5,
    Phase.RESTARTED: 0.8,
}


def counted(device: int = 0, external: int = 0, read: int = 0, prompt_tokens: int = PROMPT_TOKENS) -> EngineCounters:
    """Tokens found on the device, loaded by the connector, and of these read from NVMe."""
    return EngineCounters(prompt_tokens, device, external, external * 10, 0, {"nvme": read * 10}, {"nvme": 0})


PLANNED: Mapping[Phase, EngineCounters] = {
    Phase.COLD: counted(),
    Phase.DEVICE_HIT: counted(device=4096),
    Phase.GATEWAY: counted(device=4096),
    Phase.CPU_TIER: counted(external=4096),
    Phase.OTHER_ENGINE: counted(external=4096, read=4096),
    Phase.RESTARTED: counted(external=4096, read=4096),
}


def sample(
    phase: Phase,
    document: int = 0,
    token_ids: Sequence[int] = (1, 2, 3),
    delta: EngineCounters | None = None,
    ttft_seconds: float | None = None,
    leads: Sequence[float] = (),
) -> Sample:
    delta = delta if delta is not None else PLANNED[phase]
    served = attribute(delta, LIMITS)
    headers = {"x-spillway-engine": "engine-0", "content-type": "x"} if phase is Phase.GATEWAY else {}
    seconds = ttft_seconds if ttft_seconds is not None else TTFT_SECONDS[phase]
    cached = sum(served.tokens_by_tier.values())
    answer = Answer("Lisbon", tuple(token_ids), PROMPT_TOKENS, cached, seconds, headers, tuple(leads))
    return Sample(phase, document, ENGINES.get(phase, "engine-0"), answer, delta, served)


def rows_of(samples: Sequence[Sample]) -> list[Row]:
    phases = [phase for phase in Phase if any(sample.phase is phase for sample in samples)]
    return [
        summarise([sample for sample in samples if sample.phase is phase], samples, LIMITS, "nvme") for phase in phases
    ]


def whole_run() -> list[Sample]:
    return [sample(phase, document) for phase in Phase for document in range(3)]
