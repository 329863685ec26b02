"""Choice of the transport that copies between the device of this process and the CPU tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm.platforms import current_platform

from spillway_connector import metrics
from spillway_connector.config import ConnectorConfig
from spillway_connector.device.copier import Copier, Direction
from spillway_connector.device.cpu import HostCopier
from spillway_connector.device.cuda.driver import CudaDriver
from spillway_connector.device.cuda.transport import CudaTransport, torch_cuda_device
from spillway_connector.device.host_region import HostRegion
from spillway_connector.device.npu.acl import Acl
from spillway_connector.device.npu.transport import NpuTransport, torch_npu_device
from spillway_connector.device.stream_copier import CopyLimits
from spillway_connector.engine.ipc.samples import Samples
from spillway_connector.errors import ConfigError
from spillway_connector.plan.copy_table import BATCH, H200_TABLE, LOOP


@dataclass(frozen=True, slots=True)
class OpenTransport:
    """An open transport. copier: makes the copier of one direction. device: the NPU or GPU to report on; else None."""

    copier: Callable[[Direction], Copier]
    device: NpuTransport | CudaTransport | None = None


def open_transport(config: ConnectorConfig, region: HostRegion) -> OpenTransport:
    """Open this platform's transport, or the configured one, in a rank's process once its device is set.

    Raises ConfigError when there is none, or batch_memcpy forbids it.
    """
    platform = "cpu" if current_platform.is_cpu() else current_platform.device_type
    transport = platform if config.transport == "auto" else config.transport
    if transport == "npu":
        device, compute_stream = torch_npu_device() if platform == "npu" else (0, lambda: 0)
        acl = Acl(config.acl_library_path)
        limits = CopyLimits(descriptors=config.max_copy_descriptors)
        npu = NpuTransport(acl, region, device, compute_stream, config.batch_memcpy, limits=limits)
        return OpenTransport(npu.copier, npu)
    if transport == "cuda" and platform == "cuda":
        device, compute_stream = torch_cuda_device()
        cuda = CudaTransport(
            CudaDriver.load(config.cuda_library_path),
            region,
            device,
            compute_stream,
            config.batch_memcpy,
            table=config.copy_table or H200_TABLE,
            limits=CopyLimits(descriptors=config.max_copy_descriptors),
        )
        return OpenTransport(cuda.copier, cuda)
    if transport != "cpu" or platform != "cpu":
        raise ConfigError(
            f"transport: {config.transport!r} does not serve platform {platform!r} in this build; "
            "supported platforms: cpu, cuda, npu"
        )
    if config.batch_memcpy == "on":
        raise ConfigError("batch_memcpy: 'on' needs an NPU or GPU; on the CPU platform set 'auto' or 'off'")
    return OpenTransport(HostCopier)


def transport_name(transport: OpenTransport) -> str:
    """Name the transport as the setting `transport` does."""
    if transport.device is None:
        return "cpu"
    return "npu" if isinstance(transport.device, NpuTransport) else "cuda"


def copy_path(transport: OpenTransport) -> str:
    """Way in which the blocks of one job are copied: by `batch`ed calls, in a `loop`, or by the CPU (`none`)."""
    return "none" if transport.device is None else str(transport.device.path.name)


def device_state(transport: OpenTransport | None) -> Samples:
    """Samples of which way device copies go, and whether the CPU tier is page-locked; nothing on the CPU platform."""
    state = Samples()
    if transport is not None and transport.device is not None:
        path, pin = transport.device.path.name, transport.device.pin
        for name in (BATCH, LOOP):
            state.add(metrics.DEVICE_COPY_PATH, int(path == name), name)
        state.add(metrics.HOST_MEMORY_PINNED, int(pin.pinned), pin.method.value)
    return state
