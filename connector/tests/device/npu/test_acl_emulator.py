"""The emulator itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from acl_emulator import build


def test_its_own_test_under_sanitizers():
    done = subprocess.run([build.selftest()], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_npu_transport_under_sanitizers():
    """The tests of the copier and of the transport once more, on an emulator that watches every access it makes."""
    here = Path(__file__).parent
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            here / "test_copier.py",
            here / "test_transport.py",
        ],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ
        | {
            build.SANITIZED_ENV: "1",
            "LD_PRELOAD": build.sanitizer_runtimes(),
            # Python itself leaves memory at exit; what the emulator leaves is counted by its own `live`.
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        },
        timeout=540,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "passed" in done.stdout


@pytest.mark.parametrize(
    ("without", "missing"),
    [
        (build.EVERYTHING, set()),
        (build.CANN_8_3, {"aclrtMemcpyBatchAsync", "aclsysGetVersionStr", "aclrtHostRegisterV2"}),
        (build.OLD_EVENTS, {"aclrtCreateEventExWithFlag", "aclrtSynchronizeEventWithTimeout", "aclrtStreamAbort"}),
    ],
)
def test_variants_lack_what_old_runtimes_lack(without, missing):
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", build.library(without)], check=False, capture_output=True, text=True
    )
    exported = {line.split()[-1] for line in listed.stdout.splitlines()}
    everything = {"aclrtMemcpyBatchAsync", "aclsysGetVersionStr", "aclrtHostRegisterV2", "aclrtMemcpyAsync"}
    everything |= {"aclrtCreateEventExWithFlag", "aclrtSynchronizeEventWithTimeout", "aclrtStreamAbort"}
    assert everything - exported == missing


def test_faults_can_come_from_the_environment():
    """Engines in processes of their own, which no control call reaches, need this."""
    program = (
        "import ctypes, sys; lib = ctypes.CDLL(sys.argv[1]); "
        "print([lib.aclrtSetDevice(0) for _ in range(3)], [lib.aclrtGetVersion(*[ctypes.byref(ctypes.c_int())] * 3)])"
    )
    environment = os.environ | {"ACL_EMULATOR_FAULTS": "aclrtSetDevice:2:507899,aclrtGetVersion:1:100000"}
    done = subprocess.run(
        [sys.executable, "-c", program, build.library()],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert done.stdout.split("\n")[0] == "[0, 507899, 0] [100000]"


def test_the_log_tells_calls_in_order(emulator, acl):
    acl.set_device(1)
    acl.set_device(0)
    assert emulator.log() == ["0 aclrtSetDevice device=0", "0 aclrtSetDevice device=1", "0 aclrtSetDevice device=0"]
    assert emulator.calls("aclrtSetDevice") == 3
