"""The models in service, and the readers of their prompts. Changes while requests run.

A change is applied without an await, so no request sees half of it.
"""

from __future__ import annotations

from functools import partial

from spillway_gateway import interpreter
from spillway_gateway.background import on_daemon_thread
from spillway_gateway.config.settings import GatewayConfig, ModelConfig
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.roster.model_engines import ModelEngines
from spillway_gateway.roster.served import ServedModel
from spillway_gateway.routing.hot_prefixes import HotPrefixes
from spillway_gateway.tokens.fair_threads import FairThreads
from spillway_gateway.tokens.prompt import PromptReader, load_tokenizer
from spillway_gateway.tokens.tokenizer import PromptTokenizer


class Roster:
    """The models in service, on the event loop. models: by name and by alias. fleets and models are changed in place,
    so their holders see the current state. engines: what each model's engines come from."""

    def __init__(
        self, config: GatewayConfig, metrics: GatewayMetrics, threads: FairThreads, engines: ModelEngines
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._threads = threads
        self._engines = engines
        self.models: dict[str, ServedModel] = {}
        self.fleets: list[ModelFleet] = []
        for model in config.models:
            self._add_model(model, load_tokenizer(model.name, model.tokenizer))

    async def apply(self, config: GatewayConfig) -> None:
        """Apply the models, engines and limits of a validated configuration."""
        before = {fleet.name: fleet.config for fleet in self.fleets}
        # The slow part first, on a thread: nothing has changed while it runs.
        tokenizers = {
            model.name: await on_daemon_thread(partial(load_tokenizer, model.name, model.tokenizer))
            for model in config.models
            if model.name not in before or before[model.name].tokenizer != model.tokenizer
        }
        self._config = config
        self._engines.configure(config)
        for name in before.keys() - {model.name for model in config.models}:
            self._remove_model(name)
        for model in config.models:
            if model.name in before:
                self._change_model(model, tokenizers)
            else:
                self._add_model(model, tokenizers[model.name])
        self._name_models(config)
        if any(model.name not in before for model in config.models):
            interpreter.freeze()  # tables of the new indexes, while they are empty

    def _add_model(self, model: ModelConfig, tokenizer: PromptTokenizer | None) -> None:
        engines = self._engines
        fleet = engines.new_fleet(model)
        if model.tokenizer is not None:
            self._metrics.tokenizer_usable.labels(model.name).set(tokenizer is not None)
        reader = PromptReader(
            model.name,
            engines.block_sizes(fleet),
            tokenizer,
            self._threads,
            lambda: self._config.limits,
            tokens_max=lambda: fleet.prompt_tokens_max,
            keeps_tokens=lambda: self._config.admission.promotion_hints and engines.is_full(fleet.name),
            counts_prefixes=lambda: self._config.routing.warm_start_seconds > 0,
        )
        served = ServedModel(fleet, reader)
        self.fleets.append(fleet)
        for name in model.names:
            self.models[name] = served
        engines.model_added(served)

    def _remove_model(self, name: str) -> None:
        (served,) = (served for served in self._served() if served.fleet.name == name)
        self._engines.model_removed(served)
        self.fleets.remove(served.fleet)

    def _change_model(self, model: ModelConfig, tokenizers: dict[str, PromptTokenizer | None]) -> None:
        served = next(served for served in self._served() if served.fleet.name == model.name)
        served.fleet.configure(model)
        if model.name in tokenizers:
            served.reader.use(tokenizers[model.name])
            self._metrics.tokenizer_usable.labels(model.name).set(served.reader.tokenizer is not None)
        self._engines.model_changed(served, new_tokenizer=model.name in tokenizers)

    def _name_models(self, config: GatewayConfig) -> None:
        by_name = {served.fleet.name: served for served in self._served()}
        self.models.clear()
        for model in config.models:
            for name in model.names:
                self.models[name] = by_name[model.name]

    def hot_prefixes(self, fleet: ModelFleet) -> HotPrefixes:
        """The beginnings that this process's prompts for a model share."""
        return self.models[fleet.name].reader.hot

    def _served(self) -> list[ServedModel]:
        return list({id(served): served for served in self.models.values()}.values())
