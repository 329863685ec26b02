"""The pod's parent process with small programs in vLLM's place: real processes, real signals, no engine."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spillway_engine.shared_memory import group_members

DEADLINE_SECONDS = 120.0

PARENT = """
import sys
from spillway_engine.launch import EngineCommand, run_engine
from spillway_engine.pod_channel import PodBrief
from spillway_engine.settings import LifecycleSettings

command = EngineCommand(
    [sys.executable, "-u", "-c", sys.argv[1]],
    {"SPILLWAY_TEST": "yes"},
    PodBrief(served_name="m"),
    LifecycleSettings(drain_delay_seconds=0, drain_timeout_seconds=float(sys.argv[2]), stop_timeout_seconds=1),
    ("127.0.0.1", int(sys.argv[3])) if sys.argv[3] != "0" else None,
    index=1 if sys.argv[3] != "0" else 0,
    further_pods=1 if sys.argv[3] == "0" and sys.argv[4] != "0" else 0,
    lines_port=int(sys.argv[4]),
)
sys.exit(run_engine(command, log=lambda line: print("pod:", line, flush=True)))
"""

# An engine that says "serving", has a child of its own (as vLLM has its core), and obeys.
ENGINE = """
import json, os, signal, socket, subprocess, sys, time
line = socket.socket(fileno=json.loads(os.environ["SPILLWAY_ENGINE_POD"])["control_fd"])
def tell(**event): line.sendall(json.dumps(event).encode() + b"\\n")
def orders():
    for text in line.makefile():
        yield json.loads(text)
core = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("group", os.getpgrp(), flush=True)
"""


class Pod:
    """leader_port: of the leader's server; 0: it leads itself. lines_port: at which it expects a further pod; 0: none,
    or a port at which no leader listens."""

    def __init__(
        self, engine: str, drain_timeout_seconds: float = 60.0, leader_port: int = 0, lines_port: int = 0
    ) -> None:
        self.lines: list[str] = []
        self._passed_over: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT, textwrap.dedent(engine)]
            + [str(each) for each in (drain_timeout_seconds, leader_port, lines_port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for(self, text: str) -> str:
        """The first line that holds `text` among those that earlier waits passed over, else the next one that does:
        processes of the pod print in any order."""
        for line in self._passed_over:
            if text in line:
                self._passed_over.remove(line)
                return line
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return line
            self._passed_over.append(line)
        raise AssertionError(f"{text!r} never came: {self.lines}")

    def group(self) -> int:
        return int(self.wait_for("group ").split()[1])

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Exit code and all output."""
        rest, _ = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, "".join(self.lines) + rest


@pytest.fixture
def pods() -> Iterator[list[Pod]]:
    started: list[Pod] = []
    yield started
    for pod in started:
        pod.process.kill()
        pod.process.communicate()


def wait_group_gone(group_id: int) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while members := group_members(group_id):
        assert time.monotonic() < deadline, f"still there: {members}"


def test_a_crash_is_passed_on_with_its_cause(pods: list[Pod]) -> None:
    pods.append(pod := Pod(ENGINE + "raise SystemExit(print('ValueError: no memory for KV', flush=True) or 3)"))
    group_id = pod.group()
    code, output = pod.end()

    assert code == 3
    assert "pod: the engine ended by itself with status 3: ValueError: no memory for KV" in output
    assert group_members(group_id) == []


def test_a_kill_is_reported_as_one(pods: list[Pod]) -> None:
    pods.append(pod := Pod(ENGINE + "os.kill(os.getpid(), signal.SIGKILL)"))
    code, output = pod.end()

    assert code == 137
    assert "pod: the engine was killed (SIGKILL" in output
    assert "pod: ended 1 processes that vLLM left running" in output


def test_a_stop_drains_first_and_ends_with_zero(pods: list[Pod]) -> None:
    pods.append(
        pod := Pod(
            ENGINE
            + """
tell(event="serving"); tell(event="ready")
print("order", next(orders()), flush=True)
tell(event="drained", finished=2, cancelled=1)
signal.pause()
"""
        )
    )
    pod.wait_for("pod: ready")
    pod.send(signal.SIGTERM)
    code, output = pod.end()

    assert code == 0
    assert "order {'order': 'drain', 'delay_seconds': 0, 'timeout_seconds': 60.0}" in output
    assert output.index("pod: drained: 2 requests finished, 1 cancelled") < output.index("pod: stopped")


def test_a_second_signal_hurries_the_drain(pods: list[Pod]) -> None:
    pods.append(
        pod := Pod(
            ENGINE
            + """
tell(event="serving"); tell(event="ready")
for order in orders():
    print("order", order["order"], flush=True)
    if order["order"] == "hurry":
        tell(event="drained", finished=0, cancelled=4)
"""
        )
    )
    pod.wait_for("pod: ready")
    pod.send(signal.SIGTERM)
    pod.wait_for("order drain")
    pod.send(signal.SIGINT)
    code, output = pod.end()

    assert code == 0
    assert "pod: drained: 0 requests finished, 4 cancelled" in output


def test_an_engine_that_serves_nothing_yet_is_stopped_at_once(pods: list[Pod]) -> None:
    pods.append(pod := Pod(ENGINE + "signal.pause()"))
    group_id = pod.group()
    pod.send(signal.SIGTERM)
    code, output = pod.end()

    assert code == 0
    assert "pod: SIGTERM: stopping, the engine served nothing yet" in output
    assert group_members(group_id) == []


def test_an_engine_that_ignores_its_stop_is_killed_with_its_whole_group(pods: list[Pod]) -> None:
    pods.append(
        pod := Pod(
            "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ENGINE + "while True: signal.pause()"
        )
    )
    group_id = pod.group()
    pod.send(signal.SIGTERM)
    code, output = pod.end()

    assert code == 0
    assert "pod: vLLM did not end within 1 s; killing it" in output
    assert group_members(group_id) == []


def test_a_failed_self_check_ends_the_pod_with_its_own_status(pods: list[Pod]) -> None:
    pods.append(
        pod := Pod(
            ENGINE
            + """
tell(event="serving"); tell(event="self_check_failed", reason="self-check failed: set model.dtype: float32")
signal.pause()
"""
        )
    )
    code, output = pod.end()

    assert code == 4
    assert "pod: self-check failed: set model.dtype: float32" in output


def test_arguments_that_vllm_refuses_end_the_pod_with_a_sentence(pods: list[Pod]) -> None:
    """The engine ends at once after it has said so."""
    pods.append(
        pod := Pod(
            ENGINE
            + """
core.kill()
tell(event="refused", reason="extraArgs: --x is no argument of vLLM 0.32; remove it")
os._exit(2)
"""
        )
    )
    code, output = pod.end()

    assert code == 2
    assert "pod: extraArgs: --x is no argument of vLLM 0.32; remove it" in output
    assert "ended by itself" not in output


def test_kill_9_of_the_parent_leaves_no_orphan_and_no_shared_memory(pods: list[Pod]) -> None:
    name = f"psm_spillway_test_{os.getpid()}"
    shared = Path("/dev/shm") / name
    hold = f"""
import mmap
with open("/dev/shm/{name}", "w+b") as file:
    file.truncate(4096)
    held = mmap.mmap(file.fileno(), 4096)
print("holding", flush=True)
signal.pause()
"""
    engine = ENGINE.replace('"import signal; signal.pause()"', "CORE").replace(
        "core = ", f"CORE = 'import signal' + {hold!r}\ncore = "
    )
    pods.append(pod := Pod(engine + "signal.pause()"))
    try:
        group_id = pod.group()
        pod.wait_for("holding")
        assert shared.exists() and len(group_members(group_id)) == 2
        pod.send(signal.SIGKILL)
        wait_group_gone(group_id)
        _, output = pod.end()  # the watchdog holds the output open until it is done

        assert "the parent process died; ended its engine, removed 1 shared-memory files" in output
        assert not shared.exists()
    finally:
        shared.unlink(missing_ok=True)


def test_other_signals_reach_the_engine(pods: list[Pod]) -> None:
    pods.append(
        pod := Pod(
            ENGINE
            + """
signal.signal(signal.SIGUSR1, lambda *_: print("engine got it", flush=True))
print("armed", flush=True)
while True: signal.pause()
"""
        )
    )
    pod.wait_for("armed")
    pod.send(signal.SIGUSR1)

    assert pod.wait_for("engine got it")
    pod.send(signal.SIGTERM)
    assert pod.end()[0] == 0


def test_the_engine_sees_its_environment(pods: list[Pod]) -> None:
    pods.append(pod := Pod("import os; print('env', os.environ['SPILLWAY_TEST'])"))
    code, output = pod.end()

    assert "env yes" in output
    assert code == 1  # ended unasked: a pod that stops by itself is a failure even when the engine says 0


@pytest.fixture
def leader() -> Iterator[socket.socket]:
    """A leader's port, which is closed until it listens."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        yield server


@pytest.fixture
def further(pods: list[Pod], leader: socket.socket) -> Pod:
    """A further pod of that leader, which was asked to stop while the leader serves."""
    engine = ENGINE + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.pause()"
    pods.append(pod := Pod(engine, leader_port=leader.getsockname()[1]))
    pod.group()
    leader.listen()
    pod.send(signal.SIGTERM)
    pod.wait_for("waiting for the leader's drain")
    return pod


def test_the_ranks_of_a_further_pod_wait_for_the_leader_to_end(further: Pod, leader: socket.socket) -> None:
    leader.accept()[0].close()  # a look, which finds it there
    leader.accept()[0].close()
    assert further.process.poll() is None
    leader.close()

    assert further.end()[0] == 0


def test_a_second_signal_ends_that_wait(further: Pod) -> None:
    further.send(signal.SIGTERM)

    assert further.end()[0] == 0


def test_a_further_pod_whose_leader_serves_already_starts_nothing(pods: list[Pod], leader: socket.socket) -> None:
    leader.listen()
    port = leader.getsockname()[1]
    pods.append(pod := Pod(ENGINE + "signal.pause()", leader_port=port))
    code, output = pod.end()

    assert code == 5
    assert f"pod: the leader, 127.0.0.1:{port}, serves already" in output
    assert "vLLM starts" not in output


SERVING = (
    ENGINE
    + """
tell(event="serving"); tell(event="ready")
for order in orders():
    print("order", order["order"], flush=True)
    if order["order"] == "abandon":
        tell(event="drained", finished=0, cancelled=1)
"""
)


@pytest.fixture
def pair(pods: list[Pod]) -> tuple[Pod, Pod]:
    """A leader that serves, and a further pod that has its line to it."""
    with socket.socket() as unused, socket.socket() as lines:
        for each in (unused, lines):
            each.bind(("127.0.0.1", 0))
        server, port = unused.getsockname()[1], lines.getsockname()[1]
    pods.append(leader := Pod(SERVING, lines_port=port))
    pods.append(further := Pod(ENGINE + "signal.pause()", leader_port=server, lines_port=port))
    leader.wait_for("ready")
    further.group()
    end = time.monotonic() + DEADLINE_SECONDS
    while not joined(port):
        assert time.monotonic() < end
        time.sleep(0.05)
    return leader, further


def joined(port: int) -> bool:
    """Whether a connection to that port is established."""
    tables = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    return any(line.split()[2].endswith(f":{port:04X}") and line.split()[3] == "01" for line in tables.splitlines()[1:])


def group_of(pod: Pod) -> int:
    return int(next(line for line in pod.lines if line.startswith("group")).split()[1])


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_leader_that_loses_a_further_pod_answers_its_requests_and_ends_with_all_processes(
    pair: tuple[Pod, Pod], how: str
) -> None:
    leader, further = pair
    if how == "killed":
        further.process.kill()
    else:
        further.send(signal.SIGTERM)  # its leader serves no port, so it ends at once
    leader.wait_for("order abandon")
    leader.wait_for("drained: 0 requests finished, 1 cancelled")
    assert group_members(group_of(leader)), "it still says to gateways that it ends"
    leader.send(signal.SIGTERM)  # the replica is deleted meanwhile
    code, output = leader.end()
    assert code == 6
    assert "pod 1 of this replica is gone" in output
    assert not group_members(group_of(leader))


def test_a_leader_whose_further_pod_lost_its_engine_crashes_like_one_that_lost_its_own(pair: tuple[Pod, Pod]) -> None:
    """A request may be the cause of both."""
    leader, further = pair
    os.kill(group_of(further), signal.SIGKILL)
    code, output = leader.end()
    assert code == 6
    assert "pod 1 of this replica has lost its engine, which failed" in output
    assert "order abandon" not in output
    assert not group_members(group_of(leader))


def test_a_leader_ends_at_once_if_it_has_lost_a_pod_and_is_asked_twice(pair: tuple[Pod, Pod]) -> None:
    leader, further = pair
    further.process.kill()
    leader.wait_for("drained")
    leader.send(signal.SIGTERM)
    leader.send(signal.SIGINT)
    code, output = leader.end()
    assert code == 6
    assert "again: killing the engine" in output


def test_a_leader_that_drains_does_not_wait_for_a_lost_pod_either(pair: tuple[Pod, Pod]) -> None:
    leader, further = pair
    leader.send(signal.SIGTERM)
    leader.wait_for("draining")
    further.process.kill()
    code, output = leader.end()
    assert code == 6, output


def test_a_further_pod_that_ends_after_its_leader_is_no_loss(pair: tuple[Pod, Pod]) -> None:
    leader, further = pair
    leader.process.kill()
    leader.process.wait(DEADLINE_SECONDS)
    assert further.process.poll() is None, "its ranks are left to Kubernetes"
    further.send(signal.SIGTERM)
    assert further.end()[0] == 0


def test_a_leader_whose_port_for_lines_is_taken_serves_without_them(pods: list[Pod]) -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        pods.append(leader := Pod(SERVING, lines_port=taken.getsockname()[1]))
        leader.wait_for("a lost pod is left to Kubernetes")
        leader.wait_for("ready")
        assert leader.process.poll() is None
