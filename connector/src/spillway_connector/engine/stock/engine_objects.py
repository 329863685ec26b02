"""Facts about the engine that a tier of vLLM's own spec needs and that vLLM does not pass to it.

vLLM builds a tier from an OffloadingConfig, which lacks the model's identity and most of what decides the bytes of a
block. The objects that know are arguments of the calls that lead to the tier's constructor (`OffloadingConnector` and
`OffloadingConnectorScheduler` take `vllm_config` and `kv_cache_config`), so they are read there, from the call stack:
vLLM's process-wide configuration is not set in the scheduler's process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import OffloadingSpec

from spillway_connector.errors import ConfigError

SaltOf = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class EngineObjects:
    """vLLM's, of the engine whose scheduler builds the tier.

    scheduler_half: of the connector; None if another class than vLLM's builds the tier.
    """

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    scheduler_half: OffloadingConnectorScheduler | None

    def salt_of(self, request_id: str) -> str | None:
        """The cache salt of a request that the scheduler half still follows.

        vLLM's context of a request, which tiers are given, does not carry it.
        """
        if self.scheduler_half is None:
            return None
        status = self.scheduler_half._req_status.get(request_id)
        return None if status is None else status.req.cache_salt


def engine_objects(spec: OffloadingSpec) -> EngineObjects:
    """The objects of the engine that is building a tier for `spec`. Called from the tier's constructor.

    Raises ConfigError if they are not there: without them nothing says which engines may share blocks.
    """
    found: dict[type, object] = {}
    current = get_current_vllm_config_or_none()
    if current is not None and _is_of(spec, current):
        found[VllmConfig] = current
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (VllmConfig in found and KVCacheConfig in found):
        for value in frame.f_locals.values():
            if isinstance(value, VllmConfig) and _is_of(spec, value):
                found.setdefault(VllmConfig, value)
            elif isinstance(value, KVCacheConfig):
                found.setdefault(KVCacheConfig, value)
            elif isinstance(value, OffloadingConnectorScheduler):
                found.setdefault(OffloadingConnectorScheduler, value)
        frame = frame.f_back
    vllm_config, kv_cache_config = found.get(VllmConfig), found.get(KVCacheConfig)
    scheduler_half = found.get(OffloadingConnectorScheduler)
    if not isinstance(vllm_config, VllmConfig) or not isinstance(kv_cache_config, KVCacheConfig):
        raise ConfigError(
            "the engine's configuration is not within reach of the tier, so nothing says which engines may share its "
            "blocks; build the tier through vLLM's OffloadingConnector (kv_connector: OffloadingConnector)"
        )
    assert scheduler_half is None or isinstance(scheduler_half, OffloadingConnectorScheduler)
    return EngineObjects(vllm_config, kv_cache_config, scheduler_half)


def _is_of(spec: OffloadingSpec, config: VllmConfig) -> bool:
    """Whether the spec was built from this configuration: they hold the very same settings of the connector."""
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_connector_extra_config is spec.extra_config
