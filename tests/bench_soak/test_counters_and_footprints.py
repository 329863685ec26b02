from __future__ import annotations

import os
from pathlib import Path

from soak.counters import Counters, breakers_open, tier_moves
from soak.footprints import Footprints, Generation, Sample, role_of, take_sample
from stack_driver.engine_metrics import Reading

from spillway_connector.tiers.disk.slab.layout import chunk_name
from spillway_stack.processes import ProcessIdentity


def reading(read: int, failures: int = 0, breaker: int = 0, evicted: int = 0) -> Reading:
    return Reading.parse(
        "# TYPE spillway_tier_read_bytes counter\n"
        f'spillway_tier_read_bytes_total{{tier="nvme",engine="0",model_name="m"}} {read}\n'
        "# TYPE spillway_tier_failures counter\n"
        f'spillway_tier_failures_total{{tier="nvme",operation="load",reason="payload",engine="0"}} {failures}\n'
        "# TYPE spillway_tier_evicted_frames counter\n"
        f'spillway_tier_evicted_frames_total{{tier="nvme",reason="room",engine="0"}} {evicted}\n'
        f'spillway_tier_evicted_frames_total{{tier="nvme",reason="ttl",engine="0"}} 1\n'
        "# TYPE spillway_tier_breaker_open gauge\n"
        f'spillway_tier_breaker_open{{tier="nvme",operation="load"}} {breaker}\n'
    )


def test_counters_outlive_restarts() -> None:
    counters = Counters()
    for value in (10, 25, 5, 9):  # 5: a new process
        counters.add("engine-0", reading(value))
    counters.add("engine-1", reading(100, failures=2))
    assert counters.totals["tier_read_bytes"] == 25 + 9 + 100
    assert counters.totals["tier_failures_load_payload"] == 2


def test_a_metric_is_the_sum_of_its_series() -> None:
    counters = Counters()
    counters.add("engine-0", reading(3, failures=2, evicted=4))
    assert counters.totals["tier_evicted_frames_room"] == 4
    assert counters.total("tier_evicted_frames") == 5
    assert counters.total("tier_read_bytes") == 3
    assert counters.total("tier_evict") == 0


def test_breakers_and_moves() -> None:
    assert tier_moves(reading(7)) == 7
    assert breakers_open(reading(7, breaker=1))
    assert not breakers_open(reading(7))


def test_roles() -> None:
    assert role_of("VLLM::EngineCore") == "core"
    assert role_of("python -m vllm.entrypoints.openai.api_server --middleware spillway_engine.middleware") == "server"
    assert role_of("python -m spillway_engine --config x") == "pod"
    assert role_of("python -c from multiprocessing.resource_tracker import main") is None


def test_this_process_is_sampled() -> None:
    own = ProcessIdentity.of(os.getpid())
    assert own is not None
    footprints = Footprints()
    footprints.sample(1.0, [("valkey", own)])  # whatever runs below pytest; roles are by command line
    assert all(generation.samples for generation in footprints.generations.values())


def test_descriptors_of_chunks_count_once_the_chunk_is_gone(tmp_path: Path) -> None:
    """A slab tier that fills up is no leak; one that keeps what was removed is."""

    def descriptors() -> int:
        sample = take_sample(os.getpid(), 1.0)
        assert sample is not None
        return sample.descriptors

    before = descriptors()
    chunk = tmp_path / chunk_name(3, 7)
    with chunk.open("wb"):
        assert descriptors() == before
        chunk.unlink()
        assert descriptors() == before + 1
    with (tmp_path / "index").open("wb"):
        assert descriptors() == before + 1


def test_growth_is_said_by_process_and_quantity() -> None:
    process = ProcessIdentity(4711, 1)
    mib = 1 << 20
    leak = Generation("engine-1 core", process)
    flat = Generation("engine-1 worker", process)
    for number in range(200):
        leak.samples.append(Sample(5.0 * number, 0, 500 * mib + number * mib, 50 + number // 10, 20))
        flat.samples.append(Sample(5.0 * number, number * mib, 500 * mib + number % 7 * mib, 50 + number % 3, 20))
    assert [text.split(": ")[1].split(" ")[0] for text in leak.growths()] == ["own_memory_bytes", "descriptors"]
    assert flat.growths() == []
