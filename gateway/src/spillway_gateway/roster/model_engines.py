"""The port through which the roster's models get their engines.

A process that serves alone follows sources and engines by itself (roster/local_engines.py). If several processes serve,
one of them does so, and tells the others (processes/reported_engines.py).
"""

from __future__ import annotations

from typing import Protocol

from spillway_gateway.config.settings import GatewayConfig, ModelConfig
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.roster.engine_tasks import Clients
from spillway_gateway.roster.served import ServedModel
from spillway_gateway.tokens.prompt import BlockSizes


class ModelEngines(Protocol):
    """The engines of the roster's models, on the event loop. The roster calls the methods that have `model` in their
    names without an await between them."""

    def configure(self, config: GatewayConfig) -> None:
        """Take a new configuration, before the calls for its models."""

    def new_fleet(self, model: ModelConfig) -> ModelFleet:
        """The engines of a model that will be added."""

    def block_sizes(self, fleet: ModelFleet) -> BlockSizes:
        """The block sizes of a fleet's engines, live."""

    def model_added(self, served: ServedModel) -> None: ...

    def model_changed(self, served: ServedModel, *, new_tokenizer: bool) -> None:
        """The model's settings have changed, or may have."""

    def model_removed(self, served: ServedModel) -> None: ...

    def is_full(self, model: str) -> bool:
        """Whether a request that comes now has to wait until an existing engine has room."""

    def start(self, clients: Clients) -> None:
        """Start the tasks of all models and engines."""

    async def stop(self) -> None:
        """Cancel all tasks and wait for them."""
