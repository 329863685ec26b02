"""Start of an engine on the ACL emulator: the CPU engine's KV caches count as device memory. Loaded by every
interpreter.

On an NPU vLLM allocates them on the device, and nothing has to be set.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

SPEC_MODULE = "spillway_connector.engine.spec"
LIBRARY = "libascendcl.so"


class SpecFinder(importlib.abc.MetaPathFinder):
    """Lets the module load as it is, and adds one step to its spec."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != SPEC_MODULE:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        assert found is not None and found.loader is not None
        execute = found.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            _announce_device_memory(module.SpillwayOffloadingSpec)

        found.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return found


def _announce_device_memory(spec: Any) -> None:
    get_handlers = spec.get_handlers

    @functools.wraps(get_handlers)
    def announced(self: Any, kv_caches: Any) -> Any:
        library = ctypes.CDLL(LIBRARY)
        library.emu_device_range.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        storages = {cache.tensor.untyped_storage().data_ptr(): cache.tensor for cache in kv_caches.tensors}
        if not self._handlers:
            for address, tensor in storages.items():
                assert library.emu_device_range(address, tensor.untyped_storage().nbytes())
        yield from get_handlers(self, kv_caches)

    spec.get_handlers = announced


sys.meta_path.insert(0, SpecFinder())
