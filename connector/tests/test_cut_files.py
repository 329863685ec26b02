"""A file that is cut while it is mapped costs what it held, and no process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spillway_connector.cut_files import WatchedMapping

PAGES = 64
# Each touch of a mapping is one of another kind: with the GIL, without it, by another library's thread, by many.
TOUCHES = {
    "a byte": "memory[40 * page]",
    "a word written": "memory[40 * page] = 1",
    "an array": "np.frombuffer(memory, np.uint8).sum()",
    "bytes": "bytes(memory)",
    "a copy without the GIL": "np.copyto(np.frombuffer(memory, np.uint8), np.ones(len(memory), np.uint8))",
    "a checksum without the GIL": "xxhash.xxh3_128_digest(memory)",
    "a system call": "os.pwrite(other, memory, 0)",
    "several threads": "[t.join() for t in [start(lambda: bytes(memory)) for _ in range(8)]]",
    "threads of torch": "torch.frombuffer(memory, dtype=torch.uint8).to(torch.float32).sum()",
}
PROCESS = """
import ctypes, faulthandler, mmap, os, sys, threading
import numpy as np
import xxhash
from spillway_connector.cut_files import WatchedMapping
if "torch" in sys.argv[3]:
    import torch
if sys.argv[4] == "faulthandler":
    faulthandler.enable()
page = mmap.PAGESIZE
descriptor, other = os.open(sys.argv[1], os.O_RDWR), os.memfd_create("other")
memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
memory[:] = bytes([7]) * len(memory)
address = np.frombuffer(memory, np.uint8).ctypes.data
watched = WatchedMapping.of(descriptor, address, len(memory))
assert watched.is_whole and WatchedMapping.at(address + page) is watched
def start(work):
    thread = threading.Thread(target=work)
    thread.start()
    return thread
if sys.argv[4] == "faulthandler later":
    faulthandler.enable()
exec(sys.argv[2])
print(watched.is_whole)
try:
    exec(sys.argv[3])
except OSError as error:
    print(error.errno, file=sys.stderr)
print(watched.is_whole)
watched.forget()
print("alive")
"""
CUT = "os.truncate(sys.argv[1], {})"


def run(tmp_path: Path, how: str, touch: str, more: str = "") -> subprocess.CompletedProcess[str]:
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGES * os.sysconf("SC_PAGESIZE")))
    return subprocess.run(
        [sys.executable, "-c", PROCESS, path, how, touch, more],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(("touch", "left"), [*((touch, 0) for touch in TOUCHES), ("a byte", 4096), ("bytes", 4096)])
def test_a_touch_of_what_was_cut_ends_no_process(tmp_path: Path, touch: str, left: int):
    ended = run(tmp_path, CUT.format(left), TOUCHES[touch])
    assert (ended.returncode, ended.stdout.split()) == (0, ["False", "False", "alive"]), ended.stderr


LATER = {
    "faulthandler": "faulthandler.enable()",
    "a handler of Python": "import signal; signal.signal(signal.SIGBUS, lambda *_: os._exit(3))",
    "a default": "import signal; signal.signal(signal.SIGBUS, signal.SIG_DFL)",
    "torch's data loaders": "import torch; torch._C._set_worker_signal_handlers()",
    "one after the other": "faulthandler.enable(); watched.is_whole; faulthandler.disable(); faulthandler.enable()",
}


@pytest.mark.parametrize("later", LATER)
def test_a_handler_that_is_installed_later_does_not_undo_it(tmp_path: Path, later: str):
    ended = run(tmp_path, f"{LATER[later]}; {CUT.format(0)}", "memory[40 * page]")
    assert (ended.returncode, ended.stdout.split()) == (0, ["False", "False", "alive"]), ended.stderr


@pytest.mark.parametrize(
    "how",
    [
        "os.truncate(sys.argv[1], 0); os.truncate(sys.argv[1], len(memory))",
        "open(sys.argv[1], 'wb').write(b'x')",
        "os.truncate(sys.argv[1], 1 << 30)",
        "os.system(f'cp /dev/null {sys.argv[1]}')",
    ],
    ids=["cut and made longer again", "written over", "longer", "copied over"],
)
def test_a_file_that_is_not_as_it_was_mapped_is_not_whole(tmp_path: Path, how: str):
    ended = run(tmp_path, how, "memory[0]")
    assert (ended.returncode, ended.stdout.split()) == (0, ["False", "False", "alive"]), ended.stderr


def test_a_whole_file_stays_whole(tmp_path: Path):
    ended = run(tmp_path, "os.utime(sys.argv[1]); memory[0] = 1", "bytes(memory)")
    assert (ended.returncode, ended.stdout.split()) == (0, ["True", "True", "alive"]), ended.stderr


def test_a_mapping_takes_the_place_of_one_that_was_freed_without_a_word(tmp_path: Path):
    (tmp_path / "file").write_bytes(bytes(4096))
    with (tmp_path / "file").open("rb") as file:
        # Nothing is touched, so no memory needs to be at these addresses.
        stale = WatchedMapping.of(file.fileno(), 1 << 20, 4096)
        present = WatchedMapping.of(file.fileno(), (1 << 20) + 1024, 4096)

    assert WatchedMapping.at((1 << 20) + 2048) is present
    assert WatchedMapping.at(1 << 20) is None
    for watched in (stale, present):
        watched.forget()
    assert WatchedMapping.at((1 << 20) + 2048) is None


HANDLERS = ["", "faulthandler", "faulthandler later"]


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_touch_of_any_other_mapping_ends_the_process_as_it_did(tmp_path: Path, handler: str):
    ended = run(tmp_path, CUT.format(0), "watched.forget(); memory[40 * page]", handler)
    assert ended.returncode == -7
    assert ("Bus error" in ended.stderr) is bool(handler)


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_signal_that_a_process_sends_ends_this_one_as_it_did(tmp_path: Path, handler: str):
    ended = run(tmp_path, "import signal; os.kill(os.getpid(), signal.SIGBUS)", "memory[0]", handler)
    assert ended.returncode == -7
    assert ("Bus error" in ended.stderr) is bool(handler)


STORES = """
import logging, os, sys
from pathlib import Path
import numpy as np
from spillway_connector.device.host_region import HostRegion
from spillway_connector.limits import BreakerPolicy
from spillway_connector.testing.tier_contract import NAMESPACE, key_of
from spillway_connector.tiers.memory import MemoryStore, MemoryTier
from spillway_connector.transfer.shared_tier import SharedTier, TransferLimits
ROWS, ROW_BYTES = 16, 8192
region = HostRegion(Path(sys.argv[1]), ROWS, ROW_BYTES, keeps_name=True)
region.claim_rest(0)
rows = region.create_kv_memoryview().cast("B")
tier = MemoryTier(NAMESPACE, ROW_BYTES, MemoryStore(1 << 24))
limits = TransferLimits(4, 5.0, 30.0, 30.0, BreakerPolicy(failures_to_open=3, first_rest_seconds=1.0))
shared = SharedTier(
    tier, rows=rows, row_bytes=ROW_BYTES, payload_bytes=ROW_BYTES, limits=limits, announcements=None
)
def store(job):
    keys = [key_of(job * ROWS + row) for row in range(ROWS)]
    shared.submit_store(job, keys, list(range(ROWS)))
    while not any(outcome.job_id == job for outcome in shared.finished()):
        shared.wait_for_progress(30.0)
    return tier.contains(keys, 1e12)
assert all(store(0))
assert region.is_whole
os.truncate(sys.argv[1], 3 * ROW_BYTES)
print(any(store(1)), region.is_whole)
shared.close(timeout_seconds=30.0)
"""


def test_nothing_of_rows_that_were_cut_enters_a_shared_tier(tmp_path: Path):
    ended = subprocess.run(
        [sys.executable, "-c", STORES, tmp_path / "rows"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout.split()) == (0, ["False", "False"]), ended.stderr
