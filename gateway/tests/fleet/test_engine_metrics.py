from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.config.settings import EngineConfig, RoutingConfig
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.engine_metrics import (
    LINE_BYTES_MAX,
    LINES_BYTES_MAX,
    RANKS_MAX,
    SAMPLES_MAX,
    STEP_BYTES,
    EngineReading,
    PagesOfRanks,
    read_metrics,
    wanted_lines,
)
from spillway_gateway.fleet.tier_traffic import moved_bytes

PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 7.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="128",cache_dtype="auto",num_gpu_blocks="1000",num_gpu_blocks_override="None"} 1.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 2000.0
spillway_device_copy_bytes_total{direction="store",engine="0",model_name="m"} 9e9
spillway_device_copy_bytes_total{direction="load",engine="0",model_name="m"} 2e8
spillway_device_copy_seconds_total{direction="load",engine="0",model_name="m"} 0.02
spillway_tier_load_bytes_per_second{engine="0",model_name="m",tier="nvme"} 5e9
spillway_prefill_tokens_per_second{engine="0",model_name="m"} 10000.5
spillway_prefill_tokens_per_second{engine="1",model_name="m"} 9999.5
"""


def test_a_page_of_a_data_parallel_engine() -> None:
    assert read_metrics(PAGE) == EngineReading(
        waiting_requests=2,
        running_requests=12,
        kv_usage=0.5,
        kv_capacity_tokens=128_000,
        prefill_tokens_per_second=20_000,
        cpu_load_tokens_per_second=100_000,
        shared_load_tokens_per_second=50_000,
    )


def test_each_of_two_shared_tiers_has_its_own_rate_whichever_is_named_first() -> None:
    below = b'spillway_tier_load_bytes_per_second{engine="0",model_name="m",tier="s3"} 6e9\n'
    for page in (PAGE + below, below + PAGE):
        reading = read_metrics(page)
        assert (reading.shared_load_tokens_per_second, reading.below_load_tokens_per_second) == (50_000, 60_000)
    alone = read_metrics(PAGE.replace(b'tier="nvme"', b'tier="s3"'))
    assert (alone.shared_load_tokens_per_second, alone.below_load_tokens_per_second) == (50_000, None)


def test_a_tier_is_declined_if_loads_from_it_pay_in_no_rank() -> None:
    page = b"".join(
        b'spillway_tier_loads_pay{engine="%d",tier="%s"} %d\n' % (rank, tier, pays)
        for rank, tier, pays in ((0, b"nvme", 1), (1, b"nvme", 0), (0, b"s3", 0), (1, b"s3", 0), (0, b"other", 0))
    )
    assert read_metrics(page).declined_tiers == {"s3"}
    ranks = {rank: read_metrics(own).declined_tiers for rank, own in pages_of(page).items()}
    assert ranks == {0: {"s3"}, 1: {"nvme", "s3"}}
    assert read_metrics(PAGE).declined_tiers == frozenset(), "an engine that says nothing loads"


def test_each_rank_of_a_page_has_its_own_reading() -> None:
    readings = {rank: read_metrics(page) for rank, page in pages_of(PAGE).items()}

    assert readings == {
        0: EngineReading(2, 7, 0.25, 128_000, 10000.5, 100_000, 50_000),
        1: EngineReading(0, 5, 0.5, 128_000, 9999.5),
    }


def test_another_label_that_ends_alike_names_no_rank() -> None:
    assert not PagesOfRanks(b'vllm:num_requests_running{drafter_engine="3"} 1\n').ranks


def test_the_end_of_a_page_counts_without_a_newline() -> None:
    assert read_metrics(b"vllm:num_requests_running 3").running_requests == 3


def test_what_was_never_measured_is_no_rate() -> None:
    assert read_metrics(b'spillway_prefill_tokens_per_second{engine="0"} 0.0\n') == EngineReading()
    assert read_metrics(b"spillway_prefill_tokens_per_second NaN\n") == EngineReading()
    assert read_metrics(b"spillway_prefill_tokens_per_second +Inf\n") == EngineReading()


@given(st.lists(st.one_of(st.sampled_from(PAGE.split(b"\n")), st.binary(max_size=40)), max_size=30), st.binary())
def test_no_page_breaks_the_reader(lines: list[bytes], tail: bytes) -> None:
    reading = read_metrics(b"\n".join([*lines, tail]))

    assert reading.waiting_requests >= 0 and reading.running_requests >= 0
    assert reading.kv_usage is None or 0 <= reading.kv_usage <= 1
    assert all(rate is None or 50 <= rate <= 1e7 for rate in reading[4:7])


@given(st.text("abc:_", min_size=1, max_size=3), st.integers(0, 10**6))
def test_longer_names_are_other_names(suffix: str, value: int) -> None:
    page = f"vllm:num_requests_running{suffix} {value}\nvllm:num_requests_running 1\n".encode()

    assert read_metrics(page).running_requests == 1


def wanted(page: bytes) -> tuple[bytes, int]:
    """The lines, and the steps that finding them took."""
    steps, taken = wanted_lines(page), 0
    while True:
        try:
            next(steps)
        except StopIteration as found:
            return found.value, taken
        taken += 1


def pages_of(page: bytes) -> dict[int, bytes]:
    pages = PagesOfRanks(page)
    return {rank: pages.of(rank) for rank in pages.ranks}


TRAFFIC = b"""spillway_tier_read_bytes_total{tier="nvme"} 5
spillway_tier_written_bytes_total{tier="nvme"} 7
"""


@given(st.integers(0, 3 * STEP_BYTES), st.booleans())
def test_what_is_read_of_a_page_is_in_its_wanted_lines(filler: int, ends: bool) -> None:
    page = b'vllm:other{a="b"} 1\n' * (filler // 20) + PAGE + b"x" * (filler % 100_000) + b"\n" + TRAFFIC
    lines, _ = wanted(page if ends else page.rstrip(b"\n"))

    assert read_metrics(lines) == read_metrics(page)
    assert moved_bytes(lines) == moved_bytes(page)
    assert {rank: read_metrics(own) for rank, own in pages_of(lines).items()} == {
        rank: read_metrics(own) for rank, own in pages_of(page).items()
    }


def test_a_page_of_megabytes_is_searched_in_steps_and_its_samples_are_bounded() -> None:
    line = b'vllm:num_requests_waiting{engine="%d"} 1\n'
    page = b"".join(line % (number % 10_000) for number in range(100_000))

    lines, steps = wanted(page)
    assert lines.count(b"\n") == SAMPLES_MAX - 1
    assert steps == 2  # no more is looked for

    long = b'vllm:num_requests_waiting{engine="%d",name="' + b"x" * 4_000 + b'"} 1\n'
    lines, _ = wanted(b"".join(long % number for number in range(1_000)))
    assert len(lines) < LINES_BYTES_MAX + STEP_BYTES

    page = b"vllm:other 1\n" * 300_000
    assert wanted(page) == (b"", -(-len(page) // (STEP_BYTES // 13 * 13)))
    assert wanted(b"vllm:num_requests_waiting " + b"1" * LINE_BYTES_MAX)[0] == b""
    assert wanted(b"x" * (4 << 20))[0] == b""


def test_pages_of_many_ranks_are_built_one_at_a_time() -> None:
    """Each has all samples that belong to no rank."""
    common = b"vllm:num_requests_waiting 1\n" * 10_000
    page = common + b"".join(b'vllm:num_requests_running{engine="%d"} 1\n' % rank for rank in range(RANKS_MAX))
    tracemalloc.start()
    try:
        pages = PagesOfRanks(page)
        longest = max(len(pages.of(rank)) for rank in pages.ranks)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert longest > len(common)
    assert peak_bytes < 10 * len(page)


def test_the_time_between_two_tokens_is_that_of_the_answers_since_the_last_reading() -> None:
    page = b"""vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} %g
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} %g
"""
    engine = Engine("m", EngineConfig("a", "http://127.0.0.1:1"), RoutingConfig())
    seen = []
    for seconds, tokens in ((1.0, 100.0), (2.0, 110.0), (2.0, 110.0), (0.5, 10.0)):
        engine.observed(read_metrics(page % (seconds, tokens)), engine.running_requests)
        seen.append(round(engine.token_ms, 6))
    assert seen == [10.0, 100.0, 0.0, 0.0], "nothing was answered; and after a restart the next reading tells"
