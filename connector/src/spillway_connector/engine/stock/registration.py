"""The short names `spillway-nvme` and `spillway-redis`, as a plugin of vLLM.

vLLM loads the entry point `vllm.general_plugins` in the API server, the EngineCore and every worker, so this module
imports next to nothing, and nothing of it may raise: vLLM does not guard the call.
"""

from __future__ import annotations

import importlib.util
import logging

logger = logging.getLogger(__name__)

TIERS_MODULE = "spillway_connector.engine.stock.tiers"
TIER_CLASSES = {"spillway-nvme": "SpillwayNvmeTier", "spillway-redis": "SpillwayRedisTier"}
# The configuration from which a tier is built: vLLM has it since tiers take whole chunks and report keys one by one.
_NEEDED = "vllm.v1.kv_offload.config"


def register() -> None:
    """Make the names known to vLLM's tier factory. Harmless if they are known, or if vLLM is too old for them."""
    try:
        if importlib.util.find_spec(_NEEDED) is None:
            logger.debug("Spillway's tiers are not registered: this vLLM has no %s (it needs vLLM 0.30)", _NEEDED)
            return
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError as error:
        logger.debug("Spillway's tiers are not registered: %s", error)
        return
    for name, class_name in TIER_CLASSES.items():
        try:
            SecondaryTierFactory.register_tier(name, TIERS_MODULE, class_name)
        except ValueError as error:
            logger.debug("Spillway's tier %s is not registered again: %s", name, error)
