"""Another KV connector of vLLM in the same engine, such as one that moves KV from prefill to decode engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from spillway_connector.transfer_config import LOAD_FAILURES
from spillway_settings.typed import CamelSection
from spillway_settings.values.engine import KvTransfer

COMBINATION = "MultiConnector"  # of vLLM
# Each would be a second owner of the engine's CPU tier, or is what holds the two connectors.
NOT_BESIDE = ("SpillwayConnector", "OffloadingConnector", "SimpleCPUOffloadConnector", COMBINATION)

ConnectorName = Annotated[
    str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z", description="vLLM's name of a connector, such as NixlConnector")
]
ModulePath = Annotated[
    str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*\Z", description="a Python module")
]


class KvTransferSettings(CamelSection, frozen=True):
    connector: ConnectorName
    module_path: ModulePath | None = None  # None: vLLM knows the name
    role: Literal["kv_both", "kv_producer", "kv_consumer"] = KvTransfer().role
    extra_config: dict[str, Any] = msgspec.field(default_factory=dict)  # passed on unread

    def configuration(self) -> dict[str, Any]:
        """The form that vLLM's --kv-transfer-config takes."""
        given: dict[str, Any] = {"kv_connector": self.connector, "kv_role": self.role}
        if self.module_path is not None:
            given["kv_connector_module_path"] = self.module_path
        if self.extra_config:
            given["kv_connector_extra_config"] = self.extra_config
        return given


def alone(other: KvTransferSettings) -> dict[str, Any]:
    """The only one in an engine."""
    return {**other.configuration(), **LOAD_FAILURES}


def combined(other: KvTransferSettings, own: Mapping[str, Any]) -> dict[str, Any]:
    """Both in one engine. vLLM loads a request's KV from the first that has some: the other, whose KV may be held for
    this very request by a prefill engine; what is computed goes to both."""
    return {
        "kv_connector": COMBINATION,
        "kv_role": "kv_both",
        **LOAD_FAILURES,  # vLLM reads these
        "kv_connector_extra_config": {"connectors": [other.configuration(), dict(own)]},
    }
