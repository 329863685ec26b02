"""The connector's spec for engines on the emulator: the CPU engine's KV caches become device memory."""

from __future__ import annotations

from pathlib import Path

from vllm.v1.kv_offload.base import CanonicalKVCaches

from acl_emulator.control import Emulator
from spillway_connector.engine.spec import SpillwayOffloadingSpec
from spillway_connector.engine.worker.transports import OpenTransport
from spillway_connector.plan.copies import CopyLayout


class EmulatedNpuSpec(SpillwayOffloadingSpec):
    def _open_worker(self, kv_caches: CanonicalKVCaches, rank: int) -> tuple[CopyLayout, OpenTransport]:
        assert self.settings.acl_library_path is not None
        emulator = Emulator(Path(self.settings.acl_library_path))
        storages = {cache.tensor.untyped_storage().data_ptr(): cache.tensor for cache in kv_caches.tensors}
        for address, tensor in storages.items():
            emulator.make_device_range(address, tensor.untyped_storage().nbytes())
        return super()._open_worker(kv_caches, rank)
