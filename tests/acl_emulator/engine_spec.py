"""The connector's spec for engines on the emulator: the CPU engine's KV caches become device memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches

from acl_emulator.control import Emulator
from spillway_connector.engine.spec import SpillwayOffloadingSpec


class EmulatedNpuSpec(SpillwayOffloadingSpec):
    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[Any]:
        if not self._handlers:
            assert self.config.acl_library_path is not None
            emulator = Emulator(Path(self.config.acl_library_path))
            storages = {cache.tensor.untyped_storage().data_ptr(): cache.tensor for cache in kv_caches.tensors}
            for address, tensor in storages.items():
                emulator.make_device_range(address, tensor.untyped_storage().nbytes())
        yield from super().get_handlers(kv_caches)
