from __future__ import annotations

import logging
import mmap
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from spillway_connector.device import pinned
from spillway_connector.device.npu.acl import HOST_REGISTER_PINNED, Acl
from spillway_connector.device.npu.registrars import acl_registrar, torch_npu_registrar
from spillway_connector.device.pinned import PinMethod, Registrar, pin_host_memory, row_chunks
from spillway_connector.plan.geometry import ChunkGeometry

ROW = 8192
ROWS = 10


@pytest.fixture
def address():
    mapping = mmap.mmap(-1, ROWS * ROW)
    view = np.frombuffer(mapping, dtype=np.uint8)
    yield view.ctypes.data
    assert view[0] == 0  # it was mapped all the time


def forbid_mlock(monkeypatch, errno=12):
    def refuse(*_):
        import ctypes

        ctypes.set_errno(errno)
        return -1

    monkeypatch.setattr("spillway_connector.device.pinned._libc.mlock", refuse)


def test_chunks_are_whole_rows():
    chunks = row_chunks(1 << 30, 10, ROW, 3 * ROW + 5)
    assert [(c.address - (1 << 30), c.size_bytes) for c in chunks] == [
        (0, 3 * ROW),
        (3 * ROW, 3 * ROW),
        (6 * ROW, 3 * ROW),
        (9 * ROW, ROW),
    ]
    assert len(row_chunks(0, 4, ROW, 1)) == 4  # a row larger than the chunk is a chunk


@pytest.mark.parametrize("page_bytes", [4096, 65_536])
def test_chunks_lock_and_registration_are_whole_pages(address, monkeypatch, page_bytes):
    """Rows are whole pages on any kernel, and a chunk consists of rows, whatever the largest chunk is."""
    row_bytes = ChunkGeometry(100, 1, 3, page_bytes=page_bytes).row_bytes
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(pinned._libc, "mlock", lambda at, size: asked.append((at, size)) or 0)
    monkeypatch.setattr(pinned._libc, "munlock", lambda at, size: asked.append((at, size)) or 0)
    registrar = Registrar(PinMethod.ACL, lambda at, size: asked.append((at, size)), lambda at: asked.append((at, 0)))
    pin_host_memory(address, 7, row_bytes, [registrar], chunk_bytes=2 * row_bytes + 100).release()
    assert len(asked) == 4 * 4  # register, lock, unregister, unlock of four chunks
    assert all(((at - address) % page_bytes, size % page_bytes) == (0, 0) for at, size in asked)


def test_the_runtime_registers_every_chunk_and_unregisters_it(emulator, acl, address):
    pin = pin_host_memory(address, ROWS, ROW, [acl_registrar(acl)], chunk_bytes=4 * ROW)
    assert (pin.method, pin.pinned) == (PinMethod.ACL, True)
    assert pin.boundaries == (address + 4 * ROW, address + 8 * ROW)
    assert emulator.live().host_registrations == 3
    assert f"0 aclrtHostRegisterV2 size={4 * ROW} flag=0x{HOST_REGISTER_PINNED:x}" in emulator.log()
    pin.release()
    pin.release()
    assert emulator.live().host_registrations == 0
    assert emulator.calls("aclrtHostUnregister") == 3


@pytest.mark.parametrize("failing_chunk", [1, 2, 3])
def test_a_chunk_that_fails_takes_the_others_back(emulator, acl, address, caplog, failing_chunk):
    emulator.fail("aclrtHostRegisterV2", failing_chunk, 207001)
    with caplog.at_level(logging.ERROR):
        pin = pin_host_memory(address, ROWS, ROW, [acl_registrar(acl)], chunk_bytes=4 * ROW)
    assert emulator.live().host_registrations == 0
    assert not pin.pinned
    assert pin.boundaries == ()
    assert "not pinned" in caplog.text
    assert f"chunk {failing_chunk - 1} of 3" in caplog.text
    assert "207001" in caplog.text
    pin.release()


def test_memory_that_is_registered_already_is_not_unregistered(emulator, acl, address):
    first = pin_host_memory(address, ROWS, ROW, [acl_registrar(acl)])
    second = pin_host_memory(address, ROWS, ROW, [acl_registrar(acl)])
    assert not second.pinned
    second.release()
    assert emulator.live().host_registrations == 1
    first.release()


def test_mlock_alone_keeps_pages_but_is_not_pinned(address):
    pin = pin_host_memory(address, ROWS, ROW, [])
    assert (pin.method, pin.pinned, pin.locked) == (PinMethod.MLOCK, False, True)
    pin.release()


def test_when_nothing_works_the_log_explains_it(address, monkeypatch, caplog):
    forbid_mlock(monkeypatch)
    pin = pin_host_memory(address, ROWS, ROW, [])
    assert (pin.method, pin.pinned, pin.locked) == (PinMethod.NONE, False, False)
    assert "Cannot allocate memory" in caplog.text
    assert "IPC_LOCK" in caplog.text
    pin.release()


def test_registration_without_mlock_is_pinned_all_the_same(emulator, acl, address, monkeypatch):
    forbid_mlock(monkeypatch)
    pin = pin_host_memory(address, ROWS, ROW, [acl_registrar(acl)])
    assert (pin.pinned, pin.locked) == (True, False)
    pin.release()


class TorchNpu(SimpleNamespace):
    """The two calls of torch_npu's runtime object, over a set of addresses."""

    def __init__(self, code: int = 0) -> None:
        registered: set[int] = set()

        def register(address, size, flag):
            assert flag == HOST_REGISTER_PINNED
            registered.add(address)
            return code

        def unregister(address):
            registered.remove(address)
            return 0

        runtime = SimpleNamespace(npuHostRegister=register, npuHostUnregister=unregister)
        super().__init__(npu=SimpleNamespace(npurt=lambda: runtime), registered=registered)


def test_torch_npus_hook_comes_second(emulator_8_3, address, monkeypatch):
    torch_npu = TorchNpu()
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    old = Acl(str(emulator_8_3.path))
    pin = pin_host_memory(address, ROWS, ROW, [acl_registrar(old), torch_npu_registrar()])
    assert (pin.method, pin.pinned) == (PinMethod.TORCH_NPU, True)
    assert torch_npu.registered == {address}
    pin.release()
    assert torch_npu.registered == set()


def test_a_hook_that_refuses_is_a_failure_like_any_other(address, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", TorchNpu(code=507899))
    pin = pin_host_memory(address, ROWS, ROW, [torch_npu_registrar()])
    assert pin.method is PinMethod.MLOCK
    pin.release()


def test_a_torch_npu_without_the_hook_offers_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=SimpleNamespace()))
    assert torch_npu_registrar() is None
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # not installed
    assert torch_npu_registrar() is None
