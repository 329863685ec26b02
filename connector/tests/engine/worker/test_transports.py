"""The transport that a worker opens, by platform and settings."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from acl_emulator import build
from acl_emulator.control import Emulator
from cuda_double import CudaDouble
from vllm.platforms.interface import Platform, PlatformEnum

from spillway_connector.config import ConnectorConfig
from spillway_connector.device.copier import Direction
from spillway_connector.device.cpu import HostCopier
from spillway_connector.device.cuda.copier import CudaCopier
from spillway_connector.device.cuda.driver import CudaDriver
from spillway_connector.device.host_region import HostRegion, region_path
from spillway_connector.device.npu.copier import NpuCopier
from spillway_connector.device.pinned import PinMethod
from spillway_connector.engine.worker.transports import OpenTransport, device_state, open_transport
from spillway_connector.errors import ConfigError
from spillway_connector.testing.vllm_parts import part_of


@pytest.fixture
def region():
    region = HostRegion(region_path(f"test-choice-{os.getpid()}"), 2, 4096)
    yield region
    region.cleanup()


def opened(region, **settings):
    return open_transport(ConnectorConfig.parse({"num_cpu_blocks": 1, **settings}), region)


@pytest.mark.parametrize("transport", ["auto", "cpu"])
def test_the_cpu_platform_copies_on_a_thread(region, transport):
    opened_transport = opened(region, transport=transport)
    made = opened_transport.copier(Direction.STORE)
    assert isinstance(made, HostCopier)
    made.close()


def test_on_is_refused_where_there_is_nothing_to_batch(region):
    with pytest.raises(ConfigError, match="needs an NPU or GPU"):
        opened(region, batch_memcpy="on")


def test_the_npu_transport_can_be_named(region):
    emulator = Emulator(build.library())
    emulator.reset()
    transport = opened(
        region,
        transport="npu",
        acl_library_path=str(emulator.path),
        batch_memcpy="off",
        max_copy_descriptors=77,
    )
    made = transport.copier(Direction.LOAD)
    assert isinstance(made, NpuCopier)
    assert made._limits.descriptors == 77
    assert (transport.device.path.name, transport.device.pin.pinned) == ("loop", True)
    made.close()
    assert emulator.live().host_registrations == 0
    emulator.reset()


def test_the_cuda_platform_copies_through_the_driver(region, monkeypatch):
    double = CudaDouble()
    platform = part_of(Platform, _enum=PlatformEnum.CUDA, device_type="cuda")
    monkeypatch.setattr("spillway_connector.engine.worker.transports.current_platform", platform)
    monkeypatch.setattr("spillway_connector.engine.worker.transports.torch_cuda_device", lambda: (0, lambda: 0))
    monkeypatch.setattr(CudaDriver, "load", lambda path: CudaDriver(double.proc_address))
    transport = opened(region, copy_table={}, max_copy_descriptors=77)
    made = transport.copier(Direction.LOAD)
    assert isinstance(made, CudaCopier)
    assert made._limits.descriptors == 77
    assert (transport.device.path.name, transport.device.pin.method.value) == ("batch", "cuda")
    made.close()
    assert double.live() == (0, 0, 0, 0)


def test_an_npu_without_its_runtime_names_the_missing_file(region):
    with pytest.raises(ConfigError, match=r"'/nowhere.so' cannot be loaded"):
        opened(region, transport="npu", acl_library_path="/nowhere.so")


@pytest.mark.parametrize("transport", ["auto", "cpu"])
def test_a_platform_without_a_transport_is_refused(region, monkeypatch, transport):
    platform = part_of(Platform, _enum=PlatformEnum.TPU, device_type="tpu")
    monkeypatch.setattr("spillway_connector.engine.worker.transports.current_platform", platform)
    with pytest.raises(ConfigError, match="does not serve platform 'tpu'"):
        opened(region, transport=transport)


def test_the_state_of_a_devices_transport_is_exported():
    device = SimpleNamespace(path=SimpleNamespace(name="batch"), pin=SimpleNamespace(pinned=True, method=PinMethod.ACL))
    transport = OpenTransport(HostCopier, device)
    state = device_state(transport).samples()
    assert state == {
        "spillway_device_copy_path|batch": 1,
        "spillway_device_copy_path|loop": 0,
        "spillway_host_memory_pinned|acl": 1,
    }
    device.path.name = "loop"  # fell back
    state = device_state(transport).samples()
    assert (state["spillway_device_copy_path|batch"], state["spillway_device_copy_path|loop"]) == (0, 1)


def test_the_cpu_platform_has_no_such_state():
    assert not device_state(OpenTransport(HostCopier))
    assert not device_state(None)
