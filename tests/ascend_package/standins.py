"""Stand-ins for the parts of an Ascend image that need CANN or a device, so that vllm-ascend's modules import.

Everything else is real: vLLM, torch for CPUs, and each module of vllm-ascend with its patches of vLLM. `install` comes
before the first import of vllm_ascend, in a process that does nothing else: those patches stay.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

# Package -> why it is not real here. Any attribute and any module below it exists, and does nothing.
STANDINS = {
    "torch_npu": "its library needs those of CANN",
    "acl": "CANN's own Python package",
    "mooncake": "a transfer engine that none of the modules in use here calls",
    "scipy": "not in the local environment; a rotation of weights and a policy of expert placement read it",
    "torchvision": "its kernels of images need another torch; models of images import it",
}
# Those that transformers, as it is imported, asks for a version: they are there behind it.
_LATE = {"torchvision"}
# Made by vllm-ascend's build: which board it was built for.
BUILD_INFO = "vllm_ascend._build_info"
BOARD = "A2"


class _Standin(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self) -> None:
        self.packages = set(STANDINS) - _LATE

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == BUILD_INFO or name.partition(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=name != BUILD_INFO)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Standin(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == BUILD_INFO:
            module.__dict__["__device_type__"] = BOARD
        if module.__name__ == "scipy":
            module.__dict__["__version__"] = "1.11.0"  # numba compares it
        if module.__name__ == "torch_npu":
            module.npu.current_device = lambda: 0
            module.npu.current_stream = lambda: types.SimpleNamespace(npu_stream=0)


def install() -> None:
    # Triton for CPUs or GPUs is of no use to kernels for NPUs; without a runtime, vLLM goes without it.
    runtime = MagicMock()
    runtime.driver.active.utils.get_device_properties.return_value = {"num_aic": 8, "num_vectorcore": 8}
    sys.modules["triton.runtime"] = runtime
    finder = _Finder()
    sys.meta_path.insert(0, finder)

    import torch

    torch.utils.rename_privateuse1_backend("npu")
    torch.npu = MagicMock()  # type: ignore[attr-defined]
    torch.npu.Stream = torch.npu.Event = MagicMock  # type: ignore[attr-defined]
    torch.version.cann = None  # type: ignore[attr-defined]
    torch.distributed.is_hccl_available = lambda: True  # type: ignore[attr-defined]
    importlib.import_module("vllm.transformers_utils.config")
    finder.packages |= _LATE
