"""The engine model by example: time, sharing, tiers."""

from dataclasses import replace

import pytest

from spillway_simulator.errors import RequestTooLong
from spillway_simulator.model.engine import SimulatedEngine
from spillway_simulator.model.events import BlocksRemoved, BlocksStored, Medium
from spillway_simulator.model.prefill_meter import PrefillMeter
from spillway_simulator.model.request import CachedTokens
from spillway_simulator.model.tiering import LoadMeter
from spillway_simulator.model.tiers import LoadLink, SharedTier
from spillway_simulator.wire.metrics_text import metrics_page


def finish(engine, until=1e9):
    return {item.request_id: item for item in engine.advance(until) if item.finished}


def test_a_prompt_takes_its_arithmetic_and_each_further_token_a_pass(shape, rates, ask):
    engine = SimulatedEngine("e", shape, rates)
    engine.submit(ask("a", range(20), answer=3), 0.0)
    first, *rest = engine.advance(100.0)
    assert (first.seconds, first.first, first.tokens) == (2.0, True, 1)
    assert [(item.seconds, item.tokens, item.finished) for item in rest] == [(4.0, 2, True)]


def test_a_long_prompt_is_computed_in_chunks_beside_running_answers(shape, rates, ask):
    engine = SimulatedEngine("e", replace(shape, whole_decodes=False), rates)
    engine.submit(ask("a", range(4), answer=10), 0.0)
    engine.advance(1.0)
    engine.submit(ask("b", range(100, 140)), 1.0)
    progress = engine.advance(6.5)
    first = next(item for item in progress if item.request_id == "b")
    # The pass under way ends at 2; then 23 prompt tokens fit beside the running answer, then the other 17.
    assert first.seconds == pytest.approx(2.0 + 2.3 + 1.7)
    assert [item.seconds for item in progress if item.request_id == "a"] == pytest.approx([2.0, 4.3, 6.0])


def test_one_token_of_a_cached_prompt_is_always_computed(shape, rates, ask):
    engine = SimulatedEngine("e", shape, rates)
    engine.submit(ask("a", range(8)), 0.0)
    engine.submit(ask("b", range(8)), 50.0)
    engine.submit(ask("c", range(9)), 90.0)
    done = finish(engine)
    assert done["b"].cached == CachedTokens(device=4)
    assert done["c"].cached == CachedTokens(device=8)


def test_requests_of_the_same_pass_share_blocks(shape, rates, ask):
    engine = SimulatedEngine("e", shape, rates)
    engine.submit(ask("a", range(9)), 0.0)
    engine.submit(ask("b", range(9)), 0.0)
    assert finish(engine)["b"].cached.device == 8
    assert engine.counters.computed_tokens == 10


def test_salted_prompts_share_nothing_with_others(shape, rates, ask):
    engine = SimulatedEngine("e", shape, rates)
    for at, salt in enumerate((None, "x", "y", "x")):
        engine.submit(ask(str(at), range(9), salt=salt), at * 100.0)
    done = finish(engine)
    assert [done[str(at)].cached.total for at in range(4)] == [0, 0, 0, 8]
    stored = [event for event in engine.take_events() if isinstance(event, BlocksStored)]
    assert [event.salt for event in stored if event.medium is Medium.DEVICE and event.parent is None] == [
        None,
        "x",
        "y",
    ]


def test_an_answer_is_found_by_the_next_turn(shape, rates, ask):
    engine = SimulatedEngine("e", shape, rates)
    engine.submit(ask("a", range(6), answer=6), 0.0)
    finish(engine)
    conversation = [*range(6), *range(900, 906)]
    engine.submit(ask("b", [*conversation, 1, 2, 3]), 100.0)
    assert finish(engine)["b"].cached.device == 8  # 6 + 5 tokens were computed; the last answer token was not


def test_what_left_the_device_comes_back_from_the_cpu_tier_and_then_the_shared_one(shape, rates, ask):
    shared = SharedTier(100)
    engine = SimulatedEngine("e", shape, rates, shared)
    for at in range(6):  # six prompts of ten blocks through sixteen device and eight CPU blocks
        engine.submit(ask(str(at), range(at * 100, at * 100 + 40)), at * 1000.0)
        finish(engine)
    other = SimulatedEngine("other", shape, rates, shared)
    other.submit(ask("far", range(40)), 10_000.0)
    done = finish(other)["far"]
    assert done.cached == CachedTokens(shared=36)
    assert done.seconds == pytest.approx(10_000.0 + 36 / 40 + 1.0)
    other.submit(ask("near", range(40)), 20_000.0)
    assert finish(other)["near"].cached == CachedTokens(device=36)


def test_loads_of_different_engines_queue_where_the_store_is_the_limit(shape, rates, ask):
    ends = []
    for link in (None, LoadLink()):
        shared = SharedTier(100, link)
        filler = SimulatedEngine("filler", shape, rates, shared)
        filler.submit(ask("a", range(40)), 0.0)
        finish(filler)
        engines = [SimulatedEngine(f"e{at}", shape, rates, shared) for at in range(2)]
        for engine in engines:
            engine.submit(ask("b", range(40)), 100.0)
        ends.append([finish(engine)["b"].seconds for engine in engines])
    load = 36 / 40
    assert ends[0] == pytest.approx([101.0 + load] * 2)
    assert ends[1] == pytest.approx([101.0 + load, 101.0 + 2 * load])


def test_of_two_shared_tiers_each_block_comes_from_the_nearer_one_and_is_stored_there(shape, rates, ask):
    below = SharedTier(100)
    filler = SimulatedEngine("filler", shape, rates, below)
    filler.submit(ask("all", range(40)), 0.0)
    finish(filler)
    above = SharedTier(100, below=below)
    near = SimulatedEngine("near", shape, rates, above)
    near.submit(ask("half", range(20)), 100.0)
    assert finish(near)["half"].cached == CachedTokens(shared=16)
    slow = replace(rates, below=rates.shared._replace(load_tokens_per_second=10.0))
    other = SimulatedEngine("other", shape, slow, above)
    other.submit(ask("whole", range(40)), 200.0)

    assert finish(other)["whole"].cached == CachedTokens(shared=20), "the rest would take longer than computing it"
    stored = {event.medium for event in other.take_events() if isinstance(event, BlocksStored)}
    assert stored == {Medium.DEVICE, Medium.CPU, Medium.SHARED, Medium.BELOW}
    assert len(above) == 10


def test_the_prefill_rate_is_that_of_whole_passes_and_fades():
    meter = PrefillMeter()
    meter.add(100, 5.0, 1.0)  # mostly decoding
    assert meter.per_second is None
    meter.add(1_000, 1.0, 2.0)
    assert meter.per_second == 1_000
    meter.add(1_000, 2.0, 12.0)  # a half-life later
    assert meter.per_second == pytest.approx(1_500 / 2.5)


def test_whether_loads_pay_follows_the_last_ones_and_not_a_single_one():
    meter = LoadMeter()
    assert meter.pays, "nothing is known"
    meter.add(8.0, 10.0, 0.0)
    meter.add(1.0, 1.0, 0.0)
    assert meter.pays, "9 s of loads in place of 11 s of computing"
    meter.add(1.0, 1.0, 1.0)
    assert meter.pays
    meter.add(10.0, 10.0, 21.0)  # two half-lives later
    assert not meter.pays


def asked_behind_a_slow_tier(shape, rates, ask):
    """An engine that is asked for a prompt which another engine has stored, and the tier, from which loads are slow."""
    slow = replace(rates, shared=rates.shared._replace(load_tokens_per_second=10.0))
    shared = SharedTier(100)
    filler = SimulatedEngine("filler", shape, rates, shared)
    filler.submit(ask("a", range(40)), 0.0)
    finish(filler)
    engine = SimulatedEngine("e", shape, slow, shared)
    engine.submit(ask("b", range(40)), 100.0)
    return engine, shared


def test_a_load_that_takes_longer_than_recomputing_is_not_made(shape, rates, ask):
    engine, shared = asked_behind_a_slow_tier(shape, rates, ask)
    assert finish(engine)["b"].cached == CachedTokens()
    assert engine.counters.not_worth_blocks == 9
    assert engine.tiers.declined_tiers == {"redis"}
    assert (
        'spillway_tier_loads_pay{model_name="m",engine="0",tier="redis"} 0.0'
        in metrics_page(engine, shared, "m", 0.0).decode()
    )


def test_a_connector_without_a_gate_makes_each_load(shape, rates, ask):
    engine, _ = asked_behind_a_slow_tier(replace(shape, gates_loads=False), rates, ask)
    assert finish(engine)["b"].cached == CachedTokens(shared=36)


def test_waiting_is_first_come_first_served_and_bounded_by_the_batch(shape, rates, ask):
    engine = SimulatedEngine("e", replace(shape, max_running=1), rates)
    for at in range(3):
        engine.submit(ask(str(at), [at + 1] * 8, answer=2), 0.0)
    ends = {name: item.seconds for name, item in finish(engine).items()}
    assert ends["0"] < ends["1"] < ends["2"]


def test_a_request_that_never_fits_is_refused_at_once(shape, rates, ask):
    engine = SimulatedEngine("e", shape, rates)
    with pytest.raises(RequestTooLong, match="at most 64"):
        engine.submit(ask("a", range(60), answer=5), 0.0)


def test_slowness_lasts_until_taken_back(shape, rates, ask):
    engine = SimulatedEngine("e", shape, rates)
    engine.slowdown = 10.0
    engine.submit(ask("a", range(4)), 0.0)
    assert finish(engine)["a"].seconds == 10.0
    engine.slowdown = 1.0
    engine.submit(ask("b", range(4)), 20.0)
    assert finish(engine)["b"].seconds == 21.0


def test_a_restart_forgets_all_but_the_shared_tier(shape, rates, ask):
    shared = SharedTier(100)
    engine = SimulatedEngine("e", shape, rates, shared)
    engine.submit(ask("a", range(40)), 0.0)
    finish(engine)
    engine.submit(ask("lost", range(40)), 50.0)
    engine.restart()
    assert (engine.next_time, engine.device.used_blocks) == (None, 0)
    assert engine.take_events() == [BlocksStored(Medium.SHARED, ())], "it still loads from the shared tier"
    engine.submit(ask("b", range(40)), 100.0)
    assert finish(engine)["b"].cached == CachedTokens(shared=36)


def test_clearing_the_device_keeps_the_lower_tiers(shape, rates, ask):
    engine = SimulatedEngine("e", shape, rates)
    engine.submit(ask("a", range(20), answer=4), 0.0)
    assert engine.advance(1.0) == [] and not engine.reset_prefix_cache()
    finish(engine)
    assert engine.reset_prefix_cache()
    engine.submit(ask("b", range(20)), 100.0)
    assert finish(engine)["b"].cached == CachedTokens(cpu=16)
    assert not any(isinstance(event, BlocksRemoved) for event in engine.take_events())
