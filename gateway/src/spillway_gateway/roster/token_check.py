"""Compares a model's tokenizer with every engine that becomes ready, and stops using it when one disagrees."""

from __future__ import annotations

import asyncio
import logging

import aiohttp

from spillway_gateway.fleet.engine import Engine, EngineState
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.tokens.prompt import PromptReader
from spillway_gateway.tokens.tokenizer import PromptTokenizer
from spillway_gateway.tokens.verification import Disagreement, verify_tokenizer

logger = logging.getLogger(__name__)


class TokenCheck:
    """The check of one model's tokenizer. On the event loop. Engines may be added while it runs."""

    def __init__(
        self, model: str, reader: PromptReader, session: aiohttp.ClientSession, metrics: GatewayMetrics
    ) -> None:
        self._model = model
        self._reader = reader
        self._session = session
        self._metrics = metrics
        self._changed: asyncio.Queue[Engine] = asyncio.Queue()
        self._engines: list[Engine] = []
        self._compared: set[Engine] = set()  # since they last became ready

    def add(self, engine: Engine) -> None:
        """Compare this engine whenever it becomes ready; of data parallel ranks, which share a server, the first."""
        if engine.rank:
            return
        self._engines.append(engine)
        engine.on_state.append(self._changed.put_nowait)
        self._changed.put_nowait(engine)

    def remove(self, engine: Engine) -> None:
        """Stop comparing this engine."""
        if engine in self._engines:
            self._engines.remove(engine)
            engine.on_state.remove(self._changed.put_nowait)
            self._compared.discard(engine)

    async def run(self) -> None:
        """Compare each engine when it becomes ready, until cancelled."""
        try:
            while True:
                engine = await self._changed.get()
                tokenizer = self._reader.tokenizer
                if engine.state is not EngineState.READY:
                    self._compared.discard(engine)
                elif tokenizer is not None and engine in self._engines and engine not in self._compared:
                    self._compared.add(engine)
                    await self._compare(tokenizer, engine)
        finally:
            for engine in list(self._engines):
                self.remove(engine)

    async def _compare(self, tokenizer: PromptTokenizer, engine: Engine) -> None:
        try:
            if await verify_tokenizer(
                tokenizer,
                self._session,
                model=engine.model,
                engine_name=engine.name,
                engine_url=engine.config.url,
            ):
                logger.info("model %s: tokenizer agrees with engine %s", self._model, engine.name)
            else:
                logger.warning("model %s: engine %s has no /tokenize to compare with", self._model, engine.name)
        except Disagreement as error:
            self._reader.use(None)
            self._metrics.tokenizer_usable.labels(self._model).set(0)
            logger.error(
                "model %s: the tokenizer disagrees with engine %s (%s); prompts are matched by text blocks. "
                "Point models.tokenizer at the folder that the engines serve.",
                self._model,
                engine.name,
                error,
            )
