from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from spillway_connector.device.copier import Direction
from spillway_connector.device.host_region import HostRegion, region_path
from spillway_connector.device.npu.transport import NpuTransport, torch_npu_device
from spillway_connector.device.pinned import PinMethod
from spillway_connector.errors import ConfigError
from spillway_connector.plan.copies import CopyPlan

ROWS, ROW = 12, 8192


@pytest.fixture
def region():
    region = HostRegion(region_path(f"test-npu-{os.getpid()}"), ROWS, ROW)
    yield region
    region.cleanup()


def test_the_shared_region_is_pinned_until_the_last_copier_closes(emulator, acl, region):
    transport = NpuTransport(acl, region, 0, lambda: 0, "auto", pin_chunk_bytes=5 * ROW)
    store, load = transport.copier(Direction.STORE), transport.copier(Direction.LOAD)
    assert (transport.path.name, transport.pin.method) == ("batch", PinMethod.ACL)
    assert emulator.live().host_registrations == 3
    store.close()
    assert emulator.live().host_registrations == 3
    load.close()
    assert emulator.live().host_registrations == 0


def test_copies_that_span_registrations_stay_asynchronous(emulator, acl, region):
    """One span over the whole region, which is registered in three pieces."""
    transport = NpuTransport(acl, region, 0, lambda: 0, "auto", pin_chunk_bytes=5 * ROW)
    store, load = transport.copier(Direction.STORE), transport.copier(Direction.LOAD)
    device = np.random.default_rng(1).integers(0, 255, ROWS * ROW, dtype=np.uint8)
    before = device.copy()
    emulator.make_device(device)
    columns = [np.array([value], dtype=np.int64) for value in (device.ctypes.data, region.address, ROWS * ROW)]
    store.submit(1, CopyPlan(*columns))
    store.wait({1})
    device[:] = 0
    load.submit(2, CopyPlan(*columns))
    load.wait({2})
    assert (device == before).all()
    assert [result.error for result in store.finished() + load.finished()] == [None, None]
    copies = [line for line in emulator.log() if "BatchAsync" in line]
    assert len(copies) == 2
    assert all("num_batches=3" in line and "pinned=1" in line for line in copies)
    store.close()
    load.close()
    emulator.forget_device(device)


def test_on_refuses_before_anything_is_pinned(emulator, acl, region, monkeypatch):
    monkeypatch.setenv("ACL_EMULATOR_CANN", "8.3.RC1")
    with pytest.raises(ConfigError, match="batch_memcpy: 'on' cannot work"):
        NpuTransport(acl, region, 0, lambda: 0, "on")
    assert emulator.live().host_registrations == 0


def test_memory_that_cannot_be_pinned_still_copies(emulator, acl, region):
    emulator.fail("aclrtHostRegisterV2", 1, 507899)
    transport = NpuTransport(acl, region, 0, lambda: 0, "auto")
    assert not transport.pin.pinned
    store = transport.copier(Direction.STORE)
    device = np.full(ROW, 9, dtype=np.uint8)
    emulator.make_device(device)
    columns = [np.array([value], dtype=np.int64) for value in (device.ctypes.data, region.address + ROW, ROW)]
    store.submit(1, CopyPlan(*columns))
    store.wait({1})
    rows = region.create_kv_memoryview()
    assert (np.asarray(rows)[1] == 9).all()
    del rows
    store.close()
    emulator.forget_device(device)


def test_torch_npu_tells_device_and_stream(monkeypatch):
    handles = iter([11, 22])
    npu = SimpleNamespace(current_device=lambda: 3, current_stream=lambda: SimpleNamespace(npu_stream=next(handles)))
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=npu))
    device, compute_stream = torch_npu_device()
    assert (device, compute_stream(), compute_stream()) == (3, 11, 22)
