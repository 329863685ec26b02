from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.config.settings import EngineConfig, ModelConfig, RoutingConfig
from spillway_gateway.errors import ModelNotFound, NoEngineReady
from spillway_gateway.fleet.attempt import Attempt
from spillway_gateway.fleet.engine import EXPECTED_ADAPTERS_MAX, Engine, EngineState
from spillway_gateway.fleet.engine_metrics import EngineReading
from spillway_gateway.fleet.event_decoder import BlockRemoved, BlockStored, Tier
from spillway_gateway.fleet.listed_models import read_listed_models
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.routing.fleet_view import NOTHING_HELD, EngineRates, HeldPrefix
from spillway_gateway.routing.prefix import PromptBlocks, token_block_keys
from spillway_settings.roles import EngineRole
from spillway_settings.vllm_salts import OLDEST


def fleet_of(
    names: list[str],
    clock: Callable[[], float] = lambda: 0.0,
    routing: RoutingConfig | None = None,
    *,
    block_tokens: int = 4,
    **settings: Any,
) -> ModelFleet:
    index = PrefixIndex("m", bytes_max=10_000_000, orphans_max=10, default_block_tokens=block_tokens, clock=lambda: 0.0)
    engines = tuple(EngineConfig(name, "http://127.0.0.1:1") for name in names)
    fleet = ModelFleet(ModelConfig("m", engines, **settings), routing or RoutingConfig(), index, clock=clock)
    for engine in fleet.engines.values():
        engine.set_state(EngineState.READY, "ready")
    return fleet


def rates_of(prefill: float, cpu: float) -> EngineRates:
    return EngineRates(prefill, cpu, 40_000, 10, 40_000)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 500)), max_size=80))
def test_counters_are_exact_and_never_negative(steps: list[tuple[int, int, int]]) -> None:
    fleet = fleet_of(["a", "b", "c"])
    open_attempts: list[Attempt] = []
    for action, at, tokens in steps:
        if action <= 1 or not open_attempts:
            open_attempts.append(fleet.choose(PromptBlocks([], 4, tokens, tokens), frozenset()))
        elif action == 2:
            open_attempts[at % len(open_attempts)].first_byte(1.0, measures_prefill=False)
        else:
            attempt = open_attempts.pop(at % len(open_attempts))
            attempt.close()
            attempt.close()
            attempt.first_byte(1.0, measures_prefill=False)
        assert sum(engine.running_requests for engine in fleet.engines.values()) == len(open_attempts)
        assert all(engine.running_requests >= 0 and engine.queued_tokens >= 0 for engine in fleet.engines.values())
    for attempt in open_attempts:
        attempt.close()
    assert all((engine.running_requests, engine.queued_tokens) == (0, 0) for engine in fleet.engines.values())


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 2)), max_size=40))
def test_what_a_request_reads_of_all_engines_is_as_they_are(steps: list[tuple[int, int, int]]) -> None:
    fleet, oldest = fleet_of([]), OLDEST
    for action, at, value in steps:
        name, engine = f"e{at}", fleet.engines.get(f"e{at}")
        if engine is None:
            role = EngineRole.PREFILL if value == 2 else EngineRole.BOTH
            fleet.add_engine(EngineConfig(name, "http://127.0.0.1:1", role=role))
        elif action <= 1:
            engine.set_state([EngineState.READY, EngineState.DOWN, EngineState.NOT_READY][value], "")
        elif action == 2:
            engine.withhold("it drains" if value else None)
        elif action == 3:
            card = f'{{"data":[{{"id":"m","max_model_len":{1000 * value}}}]}}'.encode()
            engine.models_listed(read_listed_models(card) if value else None)
        elif action == 4:
            engine.set_version((0, 30 + value) if value else None)
        elif action == 5:
            fleet.remove_engine(name)
        else:
            engine.refused("it died")
        engines = [*fleet.engines.values()]
        lengths = [each.prompt_tokens_max for each in engines]
        oldest = min([each.vllm for each in engines if each.vllm is not None], default=oldest)
        routable = [each for each in engines if each.state is EngineState.READY and each.withheld is None]
        roles = any(each.config.role is not EngineRole.BOTH for each in engines)
        assert (fleet.ready_engines, fleet.has_roles) == (len(routable), roles)
        assert fleet.spreads == (len(engines) > 1 and not roles) and fleet.oldest_vllm == oldest
        known = [each for each in lengths if each is not None]
        assert fleet.prompt_tokens_max == (max(known) if known and len(known) == len(lengths) else None)


def test_a_poll_that_reads_the_same_again_looks_at_no_other_engine() -> None:
    fleet = fleet_of(["a", "b"])
    engine, looks = fleet.engines["a"], []
    engine.on_read = lambda: looks.append(engine)
    listed = read_listed_models(b'{"data":[{"id":"m","max_model_len":1000}]}')
    for _ in range(3):
        engine.set_version((0, 32))
        engine.models_listed(listed)
    assert len(looks) == 2


@pytest.mark.parametrize("seconds_to_find_out", [0.0, 4.9, 60.0])
def test_requests_that_failed_together_were_not_alone_however_long_it_takes_to_find_out(
    seconds_to_find_out: float,
) -> None:
    """A look at an engine takes seconds, on a busy machine more, and its requests are judged one after another."""
    now = [100.0]
    fleet = fleet_of(["a"], clock=lambda: now[0])
    first, last = (fleet.choose(PromptBlocks([], 4, 10, 10), frozenset()) for _ in range(2))
    for attempt in (first, last):
        attempt.failed(now[0])
        now[0] += 1.0
    now[0] += seconds_to_find_out
    assert not fleet.served_alone(first)
    first.close()
    assert not fleet.served_alone(last)
    last.close()
    alone = fleet.choose(PromptBlocks([], 4, 10, 10), frozenset())
    now[0] += 10.0
    alone.failed(now[0])
    assert fleet.served_alone(alone)


def test_the_next_request_sees_the_one_before() -> None:
    """Equal prompts that are sent together wait for one computation on engines that compute without pause."""
    fleet = fleet_of(["a", "b"])
    for engine in fleet.engines.values():
        engine.busy.add(60.0, 0.0)
    prompt = PromptBlocks(range(250), 4, 1000, 1)

    first = fleet.choose(prompt, frozenset())
    again = fleet.choose(prompt, frozenset())

    assert first.engine is again.engine
    # The last token is always computed, and on the device with the block that it ends.
    assert (again.decision.held.device_tokens, again.decision.uncached_tokens) == (996, 4)


@pytest.mark.parametrize(
    ("device_blocks", "prompt_tokens", "expected"),
    [
        (4, 17, HeldPrefix(16, 0, 0)),
        (4, 16, HeldPrefix(12, 0, 0)),  # the last token is computed, and on the device with its block
        (3, 16, HeldPrefix(12, 0, 0)),  # one block is not loaded behind the device's
        (2, 16, HeldPrefix(8, 8, 0)),  # more are
        (0, 16, HeldPrefix(0, 16, 0)),  # a tier provides all of a prompt
    ],
)
def test_what_an_engine_would_not_use_of_its_blocks_does_not_count(
    device_blocks: int, prompt_tokens: int, expected: HeldPrefix
) -> None:
    fleet = fleet_of(["a"])
    tokens = list(range(16))
    fleet.index.apply("a", BlockStored([1, 2, 3, 4], None, tokens, 4, Tier.DEVICE, None, [], 0, None))
    fleet.index.apply("a", BlockStored([1, 2, 3, 4], None, [], 0, Tier.CPU, None, [], 0, None))
    fleet.index.apply("a", BlockRemoved([1, 2, 3, 4][device_blocks:], Tier.DEVICE, 0))
    prompt = PromptBlocks(token_block_keys(fleet.index.namespace(), tokens, 4), 4, prompt_tokens, 1)

    assert fleet.choose(prompt, frozenset()).decision.held == expected


def test_idle_engines_compute_the_same_prompt_side_by_side() -> None:
    fleet = fleet_of(["a", "b"])
    prompt = PromptBlocks(range(250), 4, 1000, 1)

    assert fleet.choose(prompt, frozenset()).engine is not fleet.choose(prompt, frozenset()).engine


def test_a_plain_request_leaves_the_queue_when_its_prefill_should_be_over() -> None:
    fleet = fleet_of(["a"])
    attempt = fleet.choose(PromptBlocks([], 4, 5000, 1), frozenset())
    assert attempt.expected_prefill_seconds == 1.0

    attempt.prefill_assumed()
    attempt.close()

    assert (fleet.engines["a"].queued_tokens, fleet.engines["a"].running_requests) == (0, 0)


def test_rates_follow_what_is_measured() -> None:
    fleet = fleet_of(["a"])
    for _ in range(8):
        attempt = fleet.choose(PromptBlocks([], 4, 2000, 1), frozenset())
        attempt.first_byte(2.0, measures_prefill=True)
        attempt.close()

    assert fleet.engines["a"].rates.prefill_tokens_per_second == 1000


def test_an_engine_without_samples_is_taken_to_be_like_its_fleet() -> None:
    fleet = fleet_of(["a", "b"])
    for _ in range(8):
        attempt = fleet.choose(PromptBlocks([], 4, 2000, 1), frozenset({"b"}))
        attempt.first_byte(2.0, measures_prefill=True)
        attempt.close()

    assert fleet.engines["b"].rates.prefill_tokens_per_second == 1000


def test_a_reported_rate_has_precedence_and_may_be_withdrawn() -> None:
    engine = fleet_of(["a"]).engines["a"]

    engine.observed(
        EngineReading(prefill_tokens_per_second=20_000, cpu_load_tokens_per_second=7.0), engine.running_requests
    )
    assert engine.rates == rates_of(20_000, 7.0)

    engine.observed(EngineReading(), engine.running_requests)
    assert engine.rates == rates_of(5_000, 100_000)


def test_a_load_from_the_tier_below_is_in_the_queue_of_that_tier_until_it_is_over() -> None:
    fleet = fleet_of(["a"])
    index, engine = fleet.index, fleet.engines["a"]
    index.apply("a", BlockStored([1], None, [1, 2, 3, 4], 4, Tier.DEVICE, None, [], 0, None))
    for store, blocks in (("nvme/0000000000000001", []), ("s3/0000000000000002", [1])):
        index.apply("a", BlockStored(blocks, None, [], 0, Tier.SHARED, None, [], 0, None, store=store))
    index.apply("a", BlockRemoved([1], Tier.DEVICE, 0))
    prompt = PromptBlocks(token_block_keys(index.namespace(), [1, 2, 3, 4], 4), 4, 5, 1)

    attempt = fleet.choose(prompt, frozenset())
    assert (engine.shared_link_tokens, engine.below_link_tokens) == (4, 4)
    attempt.close()
    assert (engine.shared_link_tokens, engine.below_link_tokens) == (0, 0)


def test_what_an_engine_declines_to_load_is_computed_and_not_promised() -> None:
    fleet = fleet_of(["a"])
    index, engine = fleet.index, fleet.engines["a"]
    index.apply("a", BlockStored([1], None, [1, 2, 3, 4], 4, Tier.DEVICE, None, [], 0, None))
    index.apply("a", BlockStored([1], None, [], 0, Tier.SHARED, None, [], 0, None, store="s3/0000000000000002"))
    index.apply("a", BlockRemoved([1], Tier.DEVICE, 0))
    prompt = PromptBlocks(token_block_keys(index.namespace(), [1, 2, 3, 4], 4), 4, 5, 1)
    slow = EngineReading(shared_load_tokens_per_second=100)
    found = []
    for declined in (frozenset(), frozenset({"s3"}), frozenset[str]()):
        engine.observed(slow._replace(declined_tiers=declined), engine.running_requests)
        attempt = fleet.choose(prompt, frozenset())
        (candidate,) = attempt.decision.candidates
        found.append((attempt.decision.held.total_tokens, attempt.decision.uncached_tokens, candidate.cost.load_ms))
        attempt.close()

    assert found == [(4, 1, 40.0), (0, 5, 0.0), (4, 1, 40.0)]


def test_the_tier_below_has_its_own_rate_and_is_never_taken_for_faster_before_it_is_measured() -> None:
    engine = fleet_of(["a"]).engines["a"]
    found = []
    for shared, below in ((9_000, None), (90_000, None), (90_000, 2_000)):
        reading = EngineReading(shared_load_tokens_per_second=shared, below_load_tokens_per_second=below)
        engine.observed(reading, engine.running_requests)
        found.append(engine.rates.below_load_tokens_per_second)

    assert found == [9_000, 40_000, 2_000]


def test_what_others_sent_counts_until_the_reading_is_stale() -> None:
    fleet = fleet_of(["a", "b"])
    busy = fleet.engines["a"]
    busy.observed(EngineReading(waiting_requests=5, running_requests=20), busy.running_requests)

    assert fleet.choose(PromptBlocks([], 4, 100, 1), frozenset()).engine.name == "b"
    assert busy.view(NOTHING_HELD, 0.0, ejected=False).running_requests == 25

    busy.unobserved()
    assert busy.view(NOTHING_HELD, 0.0, ejected=False).running_requests == 0


def test_memory_in_use_follows_own_requests_between_two_readings() -> None:
    fleet = fleet_of(["a"])
    engine = fleet.engines["a"]
    engine.observed(EngineReading(kv_usage=0.5, kv_capacity_tokens=10_000), engine.running_requests)

    attempt = fleet.choose(PromptBlocks([], 4, 1_000, 1), frozenset())
    assert engine.view(NOTHING_HELD, 0.0, ejected=False).kv_usage == pytest.approx(0.6)

    attempt.close(64.0)
    view = engine.view(NOTHING_HELD, 0.0, ejected=False)
    assert view.kv_usage == pytest.approx(0.5)
    assert view.kv_token_ms == pytest.approx(0.1)  # a mean stay of 1 s, in a cache of 10,000 tokens


def test_plain_replies_show_that_an_engine_is_faster_than_the_default() -> None:
    fleet = fleet_of(["a", "b"])

    def answered(computed_tokens: int | None) -> list[float]:
        for _ in range(20):
            attempt = fleet.choose(PromptBlocks([], 4, 10_000, 1), frozenset({"b"}))
            attempt.accepted(0.0)
            if computed_tokens is not None:
                attempt.counted(computed_tokens)
            attempt.prefill_assumed()
            attempt.close(0.1)
        return [engine.rates.prefill_tokens_per_second for engine in fleet.engines.values()]

    assert answered(None) == [5_000, 5_000]  # an estimate is no count, and what it refused it did not compute
    assert answered(8) == [5_000, 5_000]  # of a prompt that it cut, or had cached
    assert answered(8_000) == [80_000, 80_000]
    assert answered(20_000) == [100_000, 100_000]  # no more than was to compute


def test_an_engine_that_came_back_is_taken_for_slow_at_first() -> None:
    now = [0.0]
    engine = Engine("m", EngineConfig("a", "http://127.0.0.1:1"), RoutingConfig(), clock=lambda: now[0])

    engine.set_state(EngineState.READY, "ready")
    assert engine.current_rates(0.0) == engine.rates  # it may have been ready for long

    engine.set_state(EngineState.DOWN, "gone")
    engine.set_state(EngineState.READY, "ready")
    rates = [engine.current_rates(at).prefill_tokens_per_second for at in (0.0, 5.0, 10.0)]
    assert rates == [500, 2500, 5000]
    assert [engine.is_warming(at) for at in (0.0, 5.0, 10.0)] == [True, True, False]


def test_an_open_breaker_keeps_requests_away_unless_no_other_engine_is_left() -> None:
    now = [0.0]
    fleet = fleet_of(["a", "b"], clock=lambda: now[0])
    for _ in range(5):
        attempt = fleet.choose(PromptBlocks([], 4, 1, 1), frozenset({"b"}))
        attempt.failed(now[0])
        attempt.close()
    assert {fleet.choose(PromptBlocks([], 4, 1, key), frozenset()).engine.name for key in range(20)} == {"b"}
    forced = fleet.choose(PromptBlocks([], 4, 1, 1), frozenset({"b"}))
    assert forced.engine.name == "a"
    forced.failed(now[0])
    forced.close()

    now[0] = 5.0
    probe = fleet.choose(PromptBlocks([], 4, 1, 1), frozenset())
    assert probe.engine.name == "a"  # idle, so cheapest
    assert fleet.choose(PromptBlocks([], 4, 1, 1), frozenset()).engine.name == "b"  # one probe at a time

    probe.began()
    probe.succeeded()
    assert fleet.engines["a"].breaker.closed


def test_without_a_ready_engine_the_error_names_each_engine() -> None:
    fleet = fleet_of(["a", "b"])
    fleet.engines["a"].set_state(EngineState.DOWN, "cannot connect (Connection refused)")

    with pytest.raises(NoEngineReady, match=r"a: cannot connect .*; b: failed for this request"):
        fleet.choose(PromptBlocks([], 4, 1, 1), frozenset({"b"}))


def test_loads_at_one_store_count_for_every_engine_until_the_first_byte() -> None:
    routing = RoutingConfig(shared_store_tokens_per_second=1_000.0)
    fleet = fleet_of(["a", "b"], routing=routing)
    index = fleet.index
    index.apply("a", BlockStored([1], None, [1, 2, 3, 4], 4, Tier.DEVICE, None, [], 0, None))
    index.apply("a", BlockStored([1], None, [], 0, Tier.SHARED, None, [], 0, None, store="redis/0000000000000001"))
    index.apply("a", BlockRemoved([1], Tier.DEVICE, 0))
    prompt = PromptBlocks(token_block_keys(index.namespace(), [1, 2, 3, 4], 4), 4, 5, 1)

    first = fleet.choose(prompt, frozenset())
    assert first.decision.held.shared_tokens == 4
    second = fleet.choose(PromptBlocks([], 4, 5, 1), frozenset())
    assert [candidate.engine.store_wait_ms for candidate in second.decision.candidates] == [4.0, 4.0]
    assert all(candidate.engine.shared_busy_share > 0 for candidate in second.decision.candidates)

    first.close()
    third = fleet.choose(PromptBlocks([], 4, 5, 1), frozenset())
    assert [candidate.engine.store_wait_ms for candidate in third.decision.candidates] == [0.0, 0.0]


def lists(engine: Engine, *adapters: str) -> None:
    cards = ",".join(f'{{"id":"{name}","parent":"m"}}' for name in adapters)
    engine.models_listed(read_listed_models(f'{{"data":[{{"id":"m"}},{cards}]}}'.replace(",]", "]").encode()))


def test_an_adapter_is_loaded_elsewhere_once_a_queue_is_longer_than_the_load() -> None:
    fleet = fleet_of(["a", "b"], loadable_adapters=("*",))
    lists(fleet.engines["a"], "sql")
    lists(fleet.engines["b"])

    def chosen(tokens: int) -> str:
        return fleet.choose(PromptBlocks([], 4, tokens, 1), frozenset(), adapter="sql").engine.name

    # 5,000 tokens take a second and the load two: of what follows, "b" gets the first that would wait longer.
    assert [chosen(5_000) for _ in range(3)] == ["a", "a", "b"]


def test_an_adapter_that_no_engine_has_is_told_from_one_whose_engines_are_away() -> None:
    fleet = fleet_of(["a", "b"], adapters=("sql", "law"))
    prompt = PromptBlocks([], 4, 100, 1)
    lists(fleet.engines["a"], "sql")
    # What "b" has is not known: its list was refused. Configured adapters it has, others not.
    assert fleet.choose(prompt, frozenset(), adapter="law").engine.name == "b"
    with pytest.raises(ModelNotFound):
        fleet.choose(prompt, frozenset(), adapter="other")
    lists(fleet.engines["b"])
    with pytest.raises(ModelNotFound):
        fleet.choose(prompt, frozenset(), adapter="law")
    fleet.engines["a"].set_state(EngineState.DOWN, "cannot connect")
    with pytest.raises(NoEngineReady):
        fleet.choose(prompt, frozenset(), adapter="sql")


def test_names_that_clients_make_up_are_not_kept_without_bound() -> None:
    fleet = fleet_of(["a"], loadable_adapters=("*",))
    for number in range(2 * EXPECTED_ADAPTERS_MAX + 1):
        fleet.choose(PromptBlocks([], 4, 1, 1), frozenset(), adapter=f"made-up-{number}").close()
    expected = [fleet.engines["a"].expects_adapter(f"made-up-{at}") for at in range(2 * EXPECTED_ADAPTERS_MAX + 1)]
    assert 0 < sum(expected) <= EXPECTED_ADAPTERS_MAX and expected[-1]


@pytest.mark.parametrize("live", [True, False])
def test_only_what_an_engine_accepted_stays_in_the_index(live: bool) -> None:
    fleet = fleet_of(["a"])
    fleet.engines["a"].events_live = live
    keys = token_block_keys(1, list(range(40)), 4)
    prompt = PromptBlocks(keys, 4, 41, 1)

    refused = fleet.choose(prompt, frozenset())
    assert fleet.choose(prompt, frozenset()).decision.held.total_tokens == 40, "expected while it is under way"
    refused.first_byte(1.0, measures_prefill=False)
    refused.close()
    again = fleet.choose(PromptBlocks(token_block_keys(2, list(range(40)), 4), 4, 41, 1), frozenset())
    again.close()
    assert fleet.index.match(token_block_keys(2, list(range(40)), 4), 4) == {}
    assert fleet.index.blocks == 0

    taken = fleet.choose(prompt, frozenset())
    taken.accepted(1.0)
    taken.close()
    assert fleet.index.match(keys, 4) == {"a": HeldPrefix(40)}
    assert fleet.index.blocks == (0 if live else 10)


def burst_of(fleet: ModelFleet, count: int, prefix_tokens: int, own_tokens: int, first: int = 0) -> list[Attempt]:
    """Prompts that come at once and share a prefix, in blocks of 128."""
    prefix = list(range(first, first + prefix_tokens))
    attempts = []
    for number in range(count):
        own = [10_000_000 * (number + 1) + first + each for each in range(own_tokens)]
        keys = token_block_keys(fleet.index.namespace(), prefix + own, 128)
        attempts.append(fleet.choose(PromptBlocks(keys, 128, prefix_tokens + own_tokens, keys[0]), frozenset()))
    return attempts


def work_of(attempts: list[Attempt]) -> dict[str, int]:
    work: dict[str, int] = {}
    for attempt in attempts:
        work[attempt.engine.name] = work.get(attempt.engine.name, 0) + attempt.decision.uncached_tokens
    return work


def test_a_small_burst_computes_its_cold_prefix_once() -> None:
    fleet = fleet_of(["a", "b", "c", "d"], block_tokens=128)

    assert list(work_of(burst_of(fleet, 4, 4_096, 256)).values()) == [4_096 + 4 * 256]


@pytest.mark.parametrize(
    ("count", "prefix", "own", "engines_used"), [(16, 8_192, 512, 4), (50, 32_768, 256, 3), (8, 65_536, 128, 1)]
)
def test_a_large_burst_is_balanced_by_tokens(count: int, prefix: int, own: int, engines_used: int) -> None:
    """No engine has more than a quarter of the prefix above what each has if all compute it."""
    work = work_of(burst_of(fleet_of(["a", "b", "c", "d"], block_tokens=128), count, prefix, own))

    assert len(work) == engines_used
    assert max(work.values()) <= prefix + own * -(-count // 4) + 0.25 * prefix


def test_bursts_with_prefixes_of_their_own_use_engines_of_their_own() -> None:
    fleet = fleet_of(["a", "b"], block_tokens=128)
    first, second = (burst_of(fleet, 3, 2_048, 128, first=at) for at in (0, 500_000))

    assert len(work_of(first)) == len(work_of(second)) == 1
    assert work_of(first).keys() != work_of(second).keys()


def test_a_prefix_that_was_computed_spreads_over_idle_engines() -> None:
    fleet = fleet_of(["a", "b"], block_tokens=128)
    for attempt in burst_of(fleet, 2, 2_048, 128):
        attempt.accepted(0.0)
        attempt.first_byte(0.0, measures_prefill=False)

    assert fleet.engines["a"].prefills.tokens == fleet.engines["b"].prefills.tokens == 0
    assert len(work_of(burst_of(fleet, 60, 2_048, 128))) == 2


def test_an_engine_that_failed_for_a_prompt_computes_nothing_for_it() -> None:
    fleet = fleet_of(["a", "b", "c"], block_tokens=128)
    (attempt,) = burst_of(fleet, 1, 4_096, 128)
    keys = token_block_keys(fleet.index.namespace(), list(range(4_096)), 128)
    retried = fleet.choose(PromptBlocks(keys, 128, 4_096, keys[0]), frozenset({attempt.engine.name}))

    assert all(each.cost.displaced_ms == 0 for each in retried.decision.candidates)
