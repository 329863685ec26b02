"""The class vLLM loads: `kv_connector: SpillwayConnector` from `kv_connector_module_path: <this module>`."""

from spillway_connector.engine.generation import Generation, generation

match generation():
    case Generation.V023:
        from spillway_connector.engine.v023.connector import SpillwayConnector
    case Generation.V030:
        from spillway_connector.engine.v030.connector import SpillwayConnector  # type: ignore[assignment]

__all__ = ["SpillwayConnector"]
