"""The class vLLM builds from `kv_connector_extra_config`: `spec_name: SpillwayOffloadingSpec`, and
`spec_module_path: <this module>`."""

from spillway_connector.engine.generation import Generation, generation

match generation():
    case Generation.V023:
        from spillway_connector.engine.v023.spec import SpillwayOffloadingSpec
    case Generation.V030:
        from spillway_connector.engine.v030.spec import SpillwayOffloadingSpec  # type: ignore[assignment]

__all__ = ["SpillwayOffloadingSpec"]
