"""Page-locking host memory with CANN's runtime: aclrtHostRegisterV2, called directly or through torch_npu."""

from __future__ import annotations

import importlib
from typing import Any

from spillway_connector.device.npu.acl import HOST_REGISTER_PINNED, Acl, AclError
from spillway_connector.device.pinned import PinMethod, Registrar


def acl_registrar(acl: Acl) -> Registrar:
    """aclrtHostRegisterV2, which registers for the calling thread's device."""
    return Registrar(PinMethod.ACL, acl.host_register_pinned, acl.host_unregister)


def torch_npu_registrar() -> Registrar | None:
    """torch_npu's binding of the call: there from 2.14, absent from the 2.10 that vllm-ascend 0.23 pins."""
    try:
        runtime: Any = importlib.import_module("torch_npu").npu.npurt()
        register, unregister = runtime.npuHostRegister, runtime.npuHostUnregister
    except (ImportError, AttributeError, RuntimeError):
        return None

    def checked_register(address: int, size_bytes: int) -> None:
        code = int(register(address, size_bytes, HOST_REGISTER_PINNED))
        if code != 0:
            raise AclError("torch_npu.npuHostRegister", code, f"address 0x{address:x}, {size_bytes} bytes")

    def checked_unregister(address: int) -> None:
        code = int(unregister(address))
        if code != 0:
            raise AclError("torch_npu.npuHostUnregister", code, f"address 0x{address:x}")

    return Registrar(PinMethod.TORCH_NPU, checked_register, checked_unregister)
