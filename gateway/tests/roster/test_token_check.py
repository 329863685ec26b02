"""Every engine that becomes ready is compared once, whenever it is added."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from spillway_gateway.config.settings import EngineConfig, LimitsConfig, RoutingConfig
from spillway_gateway.fleet.engine import Engine, EngineState
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.roster.token_check import TokenCheck
from spillway_gateway.testing.running import until


class Reader:
    """The attributes of a PromptReader that the check reads."""

    def __init__(self) -> None:
        self.tokenizer: Any = WordTokenizer()
        self.limits = LimitsConfig()


class WordTokenizer:
    """Counts its uses; a token is a byte, as the fake engine's are."""

    template = None
    used = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.used += 1
        return list(text.encode())


async def test_engines_may_be_added_and_removed_while_it_runs(start_engine: Any) -> None:
    fakes = [await start_engine(f"e{at}") for at in range(2)]
    engines = [Engine("fake", EngineConfig(fake.name, fake.url), RoutingConfig()) for fake in fakes]
    reader = Reader()
    async with aiohttp.ClientSession() as session:
        check = TokenCheck("fake", reader, session, GatewayMetrics())  # type: ignore[arg-type]
        task = asyncio.create_task(check.run())
        check.add(engines[0])
        engines[0].set_state(EngineState.READY, "ready")
        await until(lambda: reader.tokenizer.used == 1)
        check.add(engines[1])
        engines[0].withhold("its pod is not ready")
        engines[0].withhold(None)  # still the same process
        engines[1].set_state(EngineState.READY, "ready")
        await until(lambda: reader.tokenizer.used == 2)
        engines[1].set_state(EngineState.DOWN, "gone")
        await until(check._changed.empty)
        engines[1].set_state(EngineState.READY, "ready")
        await until(lambda: reader.tokenizer.used == 3)
        check.remove(engines[0])
        assert engines[0].on_state == []
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert engines[1].on_state == []
