"""The class vLLM loads: `kv_connector: SpillwayConnector` from `kv_connector_module_path: <this module>`."""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from spillway_connector.engine.generation import Generation, generation

match generation():
    case Generation.V023:
        from spillway_connector.engine.v023.connector import SpillwayConnector
    case Generation.V030:
        from spillway_connector.engine.v030.connector import SpillwayConnector  # type: ignore[assignment]

# vLLM's MultiConnector rebuilds the statistics of its connectors by registered names.
if "SpillwayConnector" not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector("SpillwayConnector", __name__, "SpillwayConnector")

__all__ = ["SpillwayConnector"]
