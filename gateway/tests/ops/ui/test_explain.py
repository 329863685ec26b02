from __future__ import annotations

import pytest

from spillway_gateway.ops.ui.explain import explain
from spillway_gateway.routing.fleet_view import EngineRates, EngineView, FleetView, HeldPrefix, RouteRequest
from spillway_gateway.routing.route import Decision, plan_route

RATES = EngineRates(10_000.0, 100_000.0, 50_000.0, 10.0)


def engine(name: str, *, running: int = 0, held: int = 0, routable: bool = True) -> EngineView:
    return EngineView(name, routable, running, 0, RATES, HeldPrefix(device_tokens=held))


def planned(request: RouteRequest, *engines: EngineView) -> Decision:
    decision = plan_route(request, FleetView(engines), 1.25)
    assert decision is not None
    return decision


@pytest.mark.parametrize(
    ("request_", "engines", "sentence"),
    [
        (
            RouteRequest(2000, 1),
            [engine("a", held=256)],
            "The only engine that could take it; holds 256 of 2,000 tokens.",
        ),
        (
            RouteRequest(2000, 1),
            [engine("a", held=1000), engine("b")],
            "Cheapest: holds 1,000 of 2,000 tokens; 100.0 ms against 200.0 ms on b.",
        ),
        (
            RouteRequest(2000, 1),
            [engine("a", held=1000, running=50), engine("b")],
            "a holds more (1,000 tokens), but would cost 600.0 ms against 200.0 ms here.",
        ),
        (
            RouteRequest(2000, 1),
            [engine("a"), engine("b")],
            "No engine holds any of 2,000 tokens; by hash among engines that cost the same.",
        ),
        (
            RouteRequest(2000, 1, tried=frozenset({"a"})),
            [engine("a"), engine("b", held=128), engine("c")],
            "Another engine failed before the first byte; of the others the cheapest, holds 128 of 2,000 tokens.",
        ),
        (RouteRequest(1, 1, only="b"), [engine("a"), engine("b")], "It keeps what the request asks for."),
    ],
)
def test_each_reason_has_its_sentence(request_: RouteRequest, engines: list[EngineView], sentence: str) -> None:
    assert explain(planned(request_, *engines)) == sentence


def test_the_least_loaded_where_no_engine_holds_any() -> None:
    sentence = explain(planned(RouteRequest(2000, 1), engine("a", running=5), engine("b")))

    assert sentence == "No engine holds any of 2,000 tokens; the least loaded; 200.0 ms against 250.0 ms on a."
