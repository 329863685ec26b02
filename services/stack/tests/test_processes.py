import dataclasses
import os
import signal
import subprocess
import sys

from spillway_stack.processes import ProcessIdentity, command_line, descendants, resident_bytes, wait_gone

FAMILY = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_process_is_its_pid_and_its_start() -> None:
    own = ProcessIdentity.of(os.getpid())

    assert own is not None and own.is_alive()
    assert ProcessIdentity.from_record(own.record()) == own
    assert not dataclasses.replace(own, start_ticks=own.start_ticks + 1).is_alive()
    assert ProcessIdentity.from_record({"pid": None, "start_ticks": None}) is None


def test_a_reused_pid_is_never_signalled() -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        identity = ProcessIdentity.of(process.pid)
        assert identity is not None
        dataclasses.replace(identity, start_ticks=1).signal(signal.SIGKILL)
        assert identity.is_alive()
        identity.signal(signal.SIGKILL)
        assert wait_gone([identity], timeout_seconds=120) == []  # a zombie counts as gone
        assert process.wait() == -signal.SIGKILL


def test_a_family_is_found_and_weighed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        family = descendants(parent.pid)
        weight_bytes = resident_bytes(family)
        line = command_line(parent.pid)
        parent.communicate()

    assert sorted(family) == sorted([parent.pid, child])
    assert 1 << 20 < weight_bytes < 200 << 20
    assert sys.executable in line


def test_an_exited_process_has_no_memory() -> None:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    pid = int(done.stdout)

    assert ProcessIdentity.of(pid) is None
    assert resident_bytes([pid]) == 0
    assert command_line(pid) == "?"
