"""The binding against the emulator, which was written from the same documentation but not from the binding."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from spillway_connector.device.npu.acl import (
    EVENT_SYNC,
    EVENT_TIME_LINE,
    STREAM_SYNC_TIMEOUT,
    Acl,
    AclError,
    CopyKind,
    version_at_least,
)
from spillway_connector.device.spans import Spans
from spillway_connector.errors import ConfigError, DeviceCopyError


@pytest.fixture
def memories(emulator, acl):
    """(device, host): 64 KiB each, the host side pinned."""
    device = np.random.default_rng(3).integers(0, 255, 1 << 16, dtype=np.uint8)
    host_address = acl.malloc_host(1 << 16)
    host = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * (1 << 16)).from_address(host_address))
    emulator.make_device(device)
    yield device, host
    acl.free_host(host_address)


@pytest.fixture
def stream(acl):
    stream = acl.create_stream()
    yield stream
    acl.discard_stream(stream)


def spans(target, source, size=4096, count=3) -> Spans:
    offsets = np.arange(count, dtype=np.int64) * 2 * size
    return Spans(target.ctypes.data + offsets, source.ctypes.data + offsets, np.full(count, size, dtype=np.int64))


def test_the_error_of_a_missing_library_names_the_remedy():
    with pytest.raises(ConfigError, match=r"acl_library_path.*set_env.sh"):
        Acl("/nowhere/libascendcl.so")


def test_another_library_is_refused_by_the_function_it_lacks():
    with pytest.raises(ConfigError, match=r"has no aclrtSetDevice"):
        Acl("libc.so.6")


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("kind", list(CopyKind))
def test_spans_arrive(acl, memories, stream, kind, batched):
    device, host = memories
    target, source = (device, host) if kind is CopyKind.HOST_TO_DEVICE else (host, device)
    source[:] = np.random.default_rng(9).integers(0, 255, source.size)
    target[:] = 0
    what = spans(target, source)
    call = acl.batch_call(what, kind, 0)
    if batched:
        call.submit(stream)
    else:
        acl.memcpy_each(what, kind, stream, hold_gil=True)
    acl.synchronize_stream(stream, 5000)
    for start in (0, 8192, 16384):
        assert (target[start : start + 4096] == source[start : start + 4096]).all()
        assert (target[start + 4096 : start + 8192] == 0).all()


def test_a_refused_descriptor_is_named_with_its_addresses_and_the_runtimes_words(acl, memories, stream):
    device, host = memories
    what = spans(host, device)
    what.sources[1] = host.ctypes.data + 60_000  # not device memory
    with pytest.raises(AclError) as caught:
        acl.batch_call(what, CopyKind.DEVICE_TO_HOST, 0).submit(stream)
    assert isinstance(caught.value, DeviceCopyError)
    assert (caught.value.function, caught.value.code) == ("aclrtMemcpyBatchAsync", 107000)
    for part in ("descriptor 1 of 3", hex(what.sources[1]), "4096 bytes", "not as its attribute says"):
        assert part in str(caught.value)
    with pytest.raises(AclError, match=r"descriptor 1 of 3.*kind 2"):
        acl.memcpy_each(what, CopyKind.DEVICE_TO_HOST, stream, hold_gil=False)


def test_a_failure_that_is_no_descriptors_tells_the_size_of_the_call(acl, memories, stream):
    device, host = memories
    what = spans(host, device)
    what.sizes_bytes[2] = 0
    with pytest.raises(AclError, match=r"3 descriptors of 8192 bytes, device_to_host"):
        acl.batch_call(what, CopyKind.DEVICE_TO_HOST, 0).submit(stream)


def test_events_time_and_order(emulator, acl, memories, stream):
    device, host = memories
    compute = acl.create_stream()
    barrier, start, end = acl.create_event(EVENT_SYNC), acl.create_event(EVENT_TIME_LINE), acl.create_event(8)
    emulator.gate(compute, 1)
    acl.record_event(barrier, compute)
    acl.stream_wait_event(stream, barrier)
    acl.record_event(start, stream)
    acl.memcpy_each(spans(host, device), CopyKind.DEVICE_TO_HOST, stream, hold_gil=True)
    acl.record_event(end, stream)
    assert not acl.event_complete(end)
    with pytest.raises(AclError) as caught:
        acl.synchronize_stream(stream, 0)
    assert caught.value.code == STREAM_SYNC_TIMEOUT
    emulator.open_gate(1)
    acl.synchronize_event(end, 5000)
    assert acl.event_complete(end)
    assert acl.elapsed_seconds(start, end) >= 0
    for event in (barrier, start, end):
        acl.destroy_event(event)
    acl.destroy_stream(compute)


def test_a_thread_without_its_device_gets_an_error(acl):
    raised = []

    def use():
        try:
            acl.create_stream()
        except AclError as error:
            raised.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert raised[0].code == 107002
    assert "the device was not set on this thread" in str(raised[0])


@pytest.mark.parametrize("version", ["8.5.0", "9.1.0", "8.3.RC1"])
def test_versions_come_from_the_package_query(acl, monkeypatch, version):
    monkeypatch.setenv("ACL_EMULATOR_CANN", version)
    assert acl.cann_version() == version
    assert acl.package_versions() == {"runtime": version, "aclsysGetCANNVersion": version}
    assert acl.interface_version().startswith("1.1")
    assert acl.take_recent_message() == ""  # of the package names that did not answer


def test_an_older_runtime_answers_by_the_older_query(emulator_8_3, monkeypatch):
    monkeypatch.setenv("ACL_EMULATOR_CANN", "8.3.RC1")
    old = Acl(str(emulator_8_3.path))
    assert old.cann_version() == "8.3.RC1"
    assert not old.has("aclrtMemcpyBatchAsync")
    with pytest.raises(AclError, match="does not export it"):
        old.host_register_pinned(4096, 4096)


def test_a_runtime_that_does_not_say_its_version(emulator, acl):
    for function in ("aclsysGetVersionStr", "aclsysGetCANNVersion"):
        emulator.fail(function, 1, 100000, times=9)
    assert acl.cann_version() is None


def test_the_emulator_is_recognised(acl):
    assert acl.is_emulator


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("8.5.0", True),
        ("8.5.0.alpha001", True),
        ("9.1.0", True),
        ("10.0.RC1", True),
        ("8.3.RC1", False),
        ("V8.0.0", False),
        ("7.0", False),
        ("unknown", None),
    ],
)
def test_versions_compare_by_number(version, expected):
    assert version_at_least(version, 8, 5) is expected
