"""Virtual time: order, exact repetition, and stopping half way."""

from __future__ import annotations

import random
from array import array

from spillway_simulator.fast_forward import FastForward
from spillway_simulator.model.engine import SimulatedEngine
from spillway_simulator.model.request import EngineRequest
from spillway_simulator.model.tiers import SharedTier


def run(shape, rates, seed, until=float("inf")):
    random_source = random.Random(seed)
    shared = SharedTier(40)
    engines = [SimulatedEngine(str(at), shape, rates, shared) for at in range(4)]
    log = []
    time = FastForward(
        engines,
        lambda position, progress: log.append((time.now, position, progress)),
        lambda position, events: log.append((time.now, position, tuple(map(repr, events)))),
    )
    for number in range(80):
        prompt = array("I", [random_source.randrange(3) for _ in range(random_source.randrange(1, 30))])
        request = EngineRequest(str(number), prompt, array("I", [9] * random_source.randrange(1, 6)))
        due, position = random_source.uniform(0, 40), random_source.randrange(4)
        time.at(due, lambda position=position, request=request: time.submit(position, request))
    time.run(until)
    return time, log


def test_time_never_goes_back_and_a_run_repeats_exactly(shape, rates):
    _, first = run(shape, rates, 5)
    _, second = run(shape, rates, 5)
    assert first == second and len(first) > 160
    assert [at for at, _, _ in first] == sorted(at for at, _, _ in first)
    assert run(shape, rates, 6)[1] != first


def test_a_run_can_be_stopped_and_continued(shape, rates):
    _, whole = run(shape, rates, 5)
    time, log = run(shape, rates, 5, until=20.0)
    assert time.now <= 20.0 and 0 < len(log) < len(whole)
    time.run()
    assert log == whole


def test_cancelled_requests_report_nothing_more(shape, rates):
    engine = SimulatedEngine("e", shape, rates)
    log = []
    time = FastForward([engine], lambda position, progress: log.append(progress), lambda position, events: None)
    time.at(0.0, lambda: time.submit(0, EngineRequest("a", array("I", [1] * 4), array("I", [2] * 9))))
    time.at(2.5, lambda: time.cancel(0, "a"))
    time.run()
    assert [progress.tokens for progress in log] == [1]
    assert engine.counters.generated_tokens == 2 and engine.device.used_blocks == 0
