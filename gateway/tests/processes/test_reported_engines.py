from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import pytest

from spillway_gateway.app import Gateway
from spillway_gateway.config.settings import EngineConfig, GatewayConfig, parse_config
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.processes import messages
from spillway_gateway.processes.messages import EngineSummary, ModelSummary
from spillway_gateway.processes.reported_engines import ReportedEngines
from spillway_gateway.processes.state_publisher import StatePublisher
from spillway_gateway.roster.roster import Roster
from spillway_gateway.tokens.fair_threads import FairThreads


def config_of(*names: str) -> GatewayConfig:
    models = [{"name": name, "engines": [{"name": f"of-{name}", "url": "http://127.0.0.1:1"}]} for name in names]
    return parse_config({"models": models})


def engine(serial: int, name: str = "e") -> EngineSummary:
    plain = msgspec.json.encode(EngineConfig(name, "http://127.0.0.1:2"))
    return EngineSummary(serial, plain, False, "", "ready", "ok", None, None, None)


def state(*engines: EngineSummary, model: str = "m", full: bool = False) -> messages.State:
    return messages.State((ModelSummary(model, (16, 32), True, full, engines),))


@pytest.fixture
def threads() -> Iterator[FairThreads]:
    with contextlib.closing(FairThreads(1, "test")) as threads:
        yield threads


async def test_a_model_has_what_the_router_reports_and_nothing_of_its_configuration(threads: FairThreads) -> None:
    config = config_of("m")
    engines = ReportedEngines(config, lambda engine: None)
    (fleet,) = Roster(config, GatewayMetrics(), threads, engines).fleets
    assert (list(fleet.engines), engines.is_full("m")) == ([], False)

    engines.update(state(engine(7), full=True))
    assert [(name, each.routable) for name, each in fleet.engines.items()] == [("e", True)]
    assert (engines.block_sizes(fleet).block_sizes, engines.is_full("m")) == ((16, 32), True)

    before = fleet.engines["e"]
    engines.update(state(engine(8)))  # the router replaced it
    assert fleet.engines["e"] is not before
    engines.update(state())
    assert (dict(fleet.engines), engines.is_full("m")) == ({}, False)


async def test_a_model_that_is_added_again_has_the_engines_that_were_reported_before(threads: FairThreads) -> None:
    both, one = config_of("m", "other"), config_of("other")
    engines = ReportedEngines(both, lambda engine: None)
    roster = Roster(both, GatewayMetrics(), threads, engines)
    page = b'{"object":"list","data":[{"id":"m","max_model_len":4096}]}'
    engines.update(state(engine(7)))
    engines.listed(messages.Listed("m", 7, page))

    await roster.apply(one)  # late: the router has the model again
    await roster.apply(both)
    fleet = roster.models["m"].fleet
    assert [(name, each.prompt_tokens_max) for name, each in fleet.engines.items()] == [("e", 4096)]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_front_has_the_engines_that_the_router_has(threads: FairThreads, ranks: int) -> None:
    """A front without them takes engines with roles for engines without, and asks for no two legs."""
    addresses = {"kvEvents": "tcp://127.0.0.1:3", "kvReplay": "tcp://127.0.0.1:13", "dataParallelRanks": ranks}
    given = [{"name": role, "url": "http://127.0.0.1:2", "role": role, **addresses} for role in ("prefill", "decode")]
    config = parse_config({"models": [{"name": "m", "engines": given}]})
    router, engines = Gateway(config), ReportedEngines(config, lambda engine: None)
    (known,), (fleet,) = router.fleets, Roster(config, GatewayMetrics(), threads, engines).fleets

    engines.update(StatePublisher(router.roster, router.engines, lambda message: None).state())

    assert {name: each.config for name, each in fleet.engines.items()} == {
        name: each.config for name, each in known.engines.items()
    }
    assert [each.rank for each in fleet.engines.values()] == 2 * ([None] if ranks == 1 else [0, 1])
    assert fleet.has_roles
