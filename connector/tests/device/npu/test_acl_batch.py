from __future__ import annotations

import logging

import pytest

from spillway_connector.device.npu.acl import Acl
from spillway_connector.device.npu.acl_batch import choose_copy_path
from spillway_connector.errors import ConfigError


@pytest.fixture
def acl_8_3(emulator_8_3):
    acl = Acl(str(emulator_8_3.path))
    acl.set_device(0)
    return acl


@pytest.mark.parametrize("mode", ["auto", "on"])
@pytest.mark.parametrize("version", ["8.5.0", "9.1.0"])
def test_batches_where_they_work(acl, monkeypatch, mode, version):
    monkeypatch.setenv("ACL_EMULATOR_CANN", version)
    path = choose_copy_path(acl, mode, 0)
    assert path.is_batch
    assert version in path.reason


def test_off_means_one_call_each(acl):
    assert choose_copy_path(acl, "off", 0).name == "loop"


def test_no_symbol_is_a_loop_or_a_refusal(acl_8_3):
    assert choose_copy_path(acl_8_3, "auto", 0).name == "loop"
    with pytest.raises(ConfigError, match=r"batch_memcpy: 'on'.*exports no aclrtMemcpyBatchAsync.*'auto' or 'off'"):
        choose_copy_path(acl_8_3, "on", 0)


def test_a_symbol_in_an_old_version_is_not_trusted(acl, monkeypatch):
    monkeypatch.setenv("ACL_EMULATOR_CANN", "8.3.RC1")
    path = choose_copy_path(acl, "auto", 0)
    assert (path.name, "8.3.RC1" in path.reason) == ("loop", True)
    with pytest.raises(ConfigError, match=r"older than 8.5"):
        choose_copy_path(acl, "on", 0)


def test_an_unknown_version_is_tried(emulator, acl):
    for function in ("aclsysGetVersionStr", "aclsysGetCANNVersion"):
        emulator.fail(function, 1, 100000, times=100)
    assert choose_copy_path(acl, "auto", 0).is_batch
    assert choose_copy_path(acl, "on", 0).is_batch


def test_on_asks_the_device_itself(acl, monkeypatch):
    monkeypatch.setenv("ACL_EMULATOR_BATCH", "unsupported")
    with pytest.raises(ConfigError, match=r"207000 \(feature not supported\)"):
        choose_copy_path(acl, "on", 0)  # the fixture sees to it that the probe gave everything back
    assert choose_copy_path(acl, "auto", 0).is_batch  # its first job finds out


@pytest.mark.parametrize("function", ["aclrtMalloc", "aclrtMallocHost", "aclrtCreateStream"])
def test_a_probe_that_cannot_even_begin_refuses(emulator, acl, function):
    emulator.fail(function, 1, 207001)
    with pytest.raises(ConfigError, match="207001"):
        choose_copy_path(acl, "on", 0)


def test_falling_back_is_logged_once(acl, caplog):
    path = choose_copy_path(acl, "auto", 0)
    with caplog.at_level(logging.WARNING):
        path.fall_back("the device said no")
        path.fall_back("the device said no")
    assert path.name == "loop"
    assert [record.message for record in caplog.records] == [
        "Spillway: device copies by loop from now on: the device said no"
    ]
