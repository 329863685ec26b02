from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from routing_policies.policy import Policy
from routing_policies.spillway import Spillway
from system import simulate
from system.agents import AgentLoad
from system.design import Answers, Design, Storing
from system.measured import COMPARED, MEASURED, outside
from system.rates import H200_QWEN3_8B, SHAPE, slower
from system.report import Answered, figures
from system.run import Kill, SystemRun
from system.systems import SYSTEMS, Pinned

from spillway_connector.plan import answers as plan_answers
from spillway_connector.plan import sessions

# An eighth of the real lengths and sizes, one engine: as crowded, in a tenth of a second.
LOAD = AgentLoad(8, 20.0, 2.0, 512, 768, 128, 8, turns=12)
SMALL = replace(SHAPE, device_blocks=50, cpu_blocks=85)
SEEDS = range(1, 5)


def cached_share(design: Design, load: AgentLoad = LOAD) -> float:
    answered = SystemRun(Pinned(), design, load, engines=1, shape=SMALL).run()
    return figures(answered, load.seconds, load.ramp_seconds)["cached_share"]


def mean_cached_share(design: Design, load: AgentLoad = LOAD) -> float:
    """Return the mean over four seeds: with one seed, any change of the tiers' order moves a share by 0.03."""
    return statistics.fmean(cached_share(design, replace(load, seed=seed)) for seed in SEEDS)


def test_a_tier_without_end_finds_most_and_no_tier_least() -> None:
    oracle, none = cached_share(Design(endless=True)), cached_share(Design(Storing.NEVER))
    for design in (Design(), Design(Storing.LAZY), Design(Storing.EXCLUSIVE)):
        assert none < cached_share(design) <= oracle


def test_a_tier_below_finds_what_the_nvme_tier_has_evicted_if_loading_it_pays() -> None:
    slow, nvme_blocks = slower(H200_QWEN3_8B, 8.0), 200
    load = replace(LOAD, sessions=48, seconds=90.0, think_seconds=16.0, ramp_seconds=16.0)

    def cached(bucket_ms: float | None) -> float:
        design = Design(shared=True, bucket_ms=bucket_ms)
        run = SystemRun(Pinned(), design, load, engines=1, shape=SMALL, rates=slow, shared_blocks=nvme_blocks)
        share = figures(run.run(), load.seconds, load.ramp_seconds)["cached_share"]
        assert run.working_set_blocks > 2 * nvme_blocks
        return share

    alone = cached(None)
    assert cached(1.0) > alone + 0.2
    assert cached(5_000.0) == pytest.approx(alone, abs=0.01)


@pytest.mark.parametrize("storing", [Storing.EAGER, Storing.EXCLUSIVE])
def test_what_a_dead_engine_stored_is_found_by_the_others_if_they_share_its_tier(storing: Storing) -> None:
    killed = Kill(1, 8.0)

    def cached_after(*, node: bool) -> float:
        loads = [replace(LOAD, seed=seed) for seed in SEEDS]
        runs = [
            SystemRun(Pinned(), Design(storing, node=node), load, engines=2, shape=SMALL, kill=killed) for load in loads
        ]
        answered = [one for run in runs for one in run.run() if killed.at <= one.sent_seconds < killed.at + 3.0]
        return sum(one.cached_tokens for one in answered) / sum(one.prompt_tokens for one in answered)

    assert cached_after(node=True) > cached_after(node=False) + 0.05


def test_exclusive_tiers_find_more_than_twice_the_same_blocks_where_only_the_sum_is_enough() -> None:
    assert cached_share(Design(Storing.EXCLUSIVE)) > cached_share(Design())


def test_recognised_conversations_cost_little_where_sessions_end_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The simulated rows follow conversations as an engine's do: if pauses are never taken for chance, and with the
    rule by which the four GPUs lost a fifth of their input tokens, that a session is expected as soon as before while
    it is overdue, these lose too."""
    recognised = Design(Storing.EXCLUSIVE, 0.4, 3.0, recognised=True)
    unknown = mean_cached_share(replace(recognised, recognised=False))
    assert mean_cached_share(recognised) > unknown - 0.005
    monkeypatch.setattr(sessions, "_CHANCE_DIFFERENCE", math.inf)
    monkeypatch.setattr(sessions, "expected_at", lambda due, late, now: math.inf if now > late else due)
    assert mean_cached_share(recognised) < unknown - 0.03


def test_nobody_is_overtaken_for_ever() -> None:
    bound = 3.0
    run = SystemRun(Pinned(), Design(overtake_seconds=bound), LOAD, engines=1, shape=SMALL)
    first = SystemRun(Pinned(), Design(), LOAD, engines=1, shape=SMALL)
    longest = max(one.first_token_seconds for one in run.run())
    assert longest <= bound + 2 * max(one.first_token_seconds for one in first.run())


def test_only_requests_that_wait_keep_their_blocks() -> None:
    waited = 0
    for seconds in (8.0, 10.0, 12.0, 14.0):
        load = replace(LOAD, seconds=seconds)
        run = SystemRun(Pinned(), Design(protect_share=0.4), load, engines=1, shape=SMALL)
        run.run()
        engine = run.engines[0]
        sequences = [*engine._waiting, *(arriving for _, arriving in engine._arriving)]
        waiting = {sequence.request.id for sequence in sequences}
        assert set(engine._kept) <= waiting
        kept = {key for _, keys in engine._kept.values() for key in keys}
        loaded = {key for *_, plan in engine._loading for key in plan.cpu_keys}
        assert set(engine.system_tiers.cpu.pinned) == kept | loaded
        waited += len(waiting)
    assert waited, "the load is more than the engine serves at once"


@pytest.mark.parametrize("policy", [Pinned, lambda: Spillway(SMALL.block_tokens)])
@pytest.mark.parametrize("back_at", [None, 12.0])
def test_an_engine_that_dies_loses_no_request_and_gets_none_until_it_is_back(
    policy: Callable[[], Policy], back_at: float | None
) -> None:
    load = replace(LOAD, seconds=24.0)
    run = SystemRun(
        policy(), Design(Storing.EXCLUSIVE, 0.4, 3.0), load, engines=2, shape=SMALL, kill=Kill(1, 8.0, back_at)
    )
    answered = run.run()
    assert len({(one.sent_seconds, one.prompt_tokens) for one in answered}) == len(answered)
    waited = max(one.first_token_seconds for one in answered)
    assert all(run.now - request.sent <= 2 * waited for request in run._open.values()), "no request is forgotten"
    if back_at is None:
        assert run.engines[1].counters.finished_requests == 0
    elif policy is Pinned:
        assert run.engines[1].counters.finished_requests > 0


def test_a_run_repeats_exactly() -> None:
    runs = [SystemRun(Pinned(), Design(Storing.EXCLUSIVE, 0.2, 3.0), LOAD, engines=2, shape=SMALL) for _ in range(2)]
    assert runs[0].run() == runs[1].run() != []


def test_turns_of_a_session_extend_its_prompt() -> None:
    answered = SystemRun(Pinned(), Design(), replace(LOAD, sessions=1), engines=1, shape=SMALL).run()
    lengths = [one.prompt_tokens for one in sorted(answered, key=lambda one: one.sent_seconds)]
    assert lengths[0] == 512 + 768 + 128
    assert all(after - before == 128 + 8 or after == lengths[0] for before, after in pairwise(lengths))


def test_every_system_gives_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "system.json"
    arguments = ["--sessions", "4", "--seconds", "14", "--output", str(output)]
    assert simulate.main([*arguments, "--systems", "vllm_offload_pinned", "spillway_all"]) == 0
    written = json.loads(output.read_text(encoding="utf-8"))
    for name in ("vllm_offload_pinned", "spillway_all"):
        assert 0 < written[f"{name}_4_sessions_cached_share"] < 1
        assert written[f"{name}_4_sessions_found_of_promised"] > 0.9, "nothing is crowded out"
    assert "simulated over measured" not in capsys.readouterr().out, "a short run is not compared"


def test_rows_outside_the_tolerance_are_named() -> None:
    row = MEASURED[0]
    exact = {name: getattr(row, name) for name in COMPARED}
    assert outside(row, exact) == []
    assert outside(row, {**exact, "cached_share": 1.2 * row.cached_share}) == ["cached_share"]
    assert {row.system for row in MEASURED} <= set(SYSTEMS)


def test_figures_count_what_ended_in_time() -> None:
    early, late = Answered(1.0, 0.5, 2.0, 100, 50, 80, 11), Answered(1.0, 0.7, 9.0, 100, 90, 90, 11)
    values = figures([early, late], 5.0, 0.0)
    assert values["requests"] == 1
    assert values["cached_share"] == 0.5
    assert values["found_of_promised"] == 0.625
    assert values["per_output_token_p50_seconds"] == pytest.approx(0.05)
    with pytest.raises(ValueError, match="give more seconds"):
        figures([early, late], 5.0, 3.0)


AS_INSTALLED = Design(Storing.EXCLUSIVE, 0.4, 3.0, recognised=True)


def of_answered(design: Design, load: AgentLoad) -> list[Answered]:
    return SystemRun(Pinned(), design, load, engines=1, shape=SMALL).run()


def cached_of(answered: list[Answered]) -> float:
    return sum(one.cached_tokens for one in answered) / sum(one.prompt_tokens for one in answered)


def test_sessions_that_requests_name_are_followed_as_well_as_recognised_ones() -> None:
    named = replace(AS_INSTALLED, recognised=False, named=True)
    assert mean_cached_share(named) > mean_cached_share(AS_INSTALLED) - 0.02


def test_who_retains_prompts_finds_more_of_them() -> None:
    load = replace(LOAD, retaining=2, seconds=40.0)
    shares = []
    for hold_share in (0.0, 0.5):
        retains = [one for one in of_answered(replace(AS_INSTALLED, hold_share=hold_share), load) if one.retains]
        shares.append(cached_of(retains))
    assert shares[1] > shares[0]


def test_answers_are_found_again_if_they_are_kept_and_come_back() -> None:
    load = replace(LOAD, answer_tokens=300, answers_return=True)
    off, on, auto = (mean_cached_share(replace(AS_INSTALLED, answers=answers), load) for answers in Answers)
    assert off < on == auto


def test_answers_that_do_not_come_back_are_kept_until_enough_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_answers, "COUNTED_MIN", 8)
    copied = []
    for answers in Answers:
        load = replace(LOAD, answer_tokens=300)
        run = SystemRun(Pinned(), replace(AS_INSTALLED, answers=answers), load, engines=1, shape=SMALL)
        run.run()
        tiers = run.engines[0].system_tiers
        assert tiers.answers.keeps is (answers is not Answers.AUTO)
        copied.append(tiers.copied_blocks)
    off, on, auto = copied
    assert off < auto < on


def test_a_crowd_delays_the_sessions_less_with_fair_steps() -> None:
    crowded = replace(LOAD, sessions=3, crowd=6, crowd_tokens=(400, 900), crowd_is_cold=True)
    means = []
    for fair in (False, True):
        answered = [
            one
            for seed in SEEDS
            for one in of_answered(replace(AS_INSTALLED, fair_steps=fair), replace(crowded, seed=seed))
        ]
        means.append(
            statistics.fmean(one.first_token_seconds for one in answered if not one.of_crowd and one.sent_seconds > 2.0)
        )
    assert means[1] < 0.98 * means[0]
