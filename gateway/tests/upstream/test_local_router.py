from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from spillway_gateway.access.admission import Admission
from spillway_gateway.access.keys import Priority
from spillway_gateway.access.session_turns import REQUEST_TOKENS
from spillway_gateway.config.settings import AdmissionConfig, EngineConfig, ModelConfig, RoutingConfig
from spillway_gateway.fleet.engine import EngineState
from spillway_gateway.fleet.event_decoder import BlockStored, Tier
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.fleet.recent import Recent
from spillway_gateway.fleet.sessions import SessionKey
from spillway_gateway.routing.fleet_view import Leg
from spillway_gateway.routing.prefix import PromptBlocks, token_block_keys
from spillway_gateway.upstream.local_router import LocalRouter


async def test_a_session_counts_what_its_engine_has_to_compute() -> None:
    index = PrefixIndex("m", bytes_max=10_000_000, orphans_max=10, default_block_tokens=4, clock=lambda: 0.0)
    fleet = ModelFleet(ModelConfig("m", (EngineConfig("a", "http://127.0.0.1:1"),)), RoutingConfig(), index)
    fleet.engines["a"].set_state(EngineState.READY, "ready")
    index.apply("a", BlockStored([1, 2], None, list(range(8)), 4, Tier.DEVICE, None, [], 0, None))
    admission = Admission(AdmissionConfig(), lambda: 9, clock=lambda: 0.0)
    unused = cast(Any, None)
    router = LocalRouter({"m": admission}, unused, unused, unused, Recent())
    prompt = PromptBlocks(token_block_keys(index.namespace(), list(range(8)), 4), 4, 100, 1)
    sessions = [SessionKey.of("t", b"one"), None]
    for session in sessions:
        request = SimpleNamespace(
            tenant="t",
            priority=Priority.NORMAL,
            prompt=prompt,
            only_engine=None,
            session=session,
            adapter=None,
            request_id=b"r",
        )
        place = await router.enter(fleet, cast(Any, request))
        await place.choose(prompt, frozenset(), Leg.WHOLE)

    for session in sessions:
        digest = session.digest if session is not None else None
        assert admission.turns.tokens_of("t", digest) == REQUEST_TOKENS + 100 - 8


async def test_of_requests_that_wait_the_one_whose_prefix_is_at_hand_is_sent_first() -> None:
    index = PrefixIndex("m", bytes_max=10_000_000, orphans_max=10, default_block_tokens=4, clock=lambda: 0.0)
    fleet = ModelFleet(ModelConfig("m", (EngineConfig("a", "http://127.0.0.1:1"),)), RoutingConfig(), index)
    fleet.engines["a"].set_state(EngineState.READY, "ready")
    index.apply("a", BlockStored([1, 2], None, list(range(8)), 4, Tier.DEVICE, None, [], 0, None))
    admission = Admission(AdmissionConfig(), lambda: 1)
    unused = cast(Any, None)
    router = LocalRouter({"m": admission}, unused, unused, unused, Recent())
    order: list[str] = []

    async def send(name: str, first_token: int) -> None:
        tokens = list(range(first_token, first_token + 8))
        prompt = PromptBlocks(token_block_keys(index.namespace(), tokens, 4), 4, 9, 1)
        request = SimpleNamespace(tenant="t", priority=Priority.NORMAL, prompt=prompt, only_engine=None, session=None)
        place = await router.enter(fleet, cast(Any, request))
        order.append(name)
        place.leave()

    await admission.enter("t", Priority.NORMAL)
    tasks = [asyncio.create_task(send("cold", 500)), asyncio.create_task(send("held", 0))]
    await asyncio.sleep(0)
    admission.leave("t")
    await asyncio.gather(*tasks)

    assert order == ["held", "cold"]
