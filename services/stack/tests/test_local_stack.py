"""The supervisor with trivial processes in place of the components: real pids, ports, files."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from free_ports import free_port

from spillway_stack import __main__ as command_line
from spillway_stack.components import Component
from spillway_stack.errors import ComponentFailed, StackDiffers
from spillway_stack.local_stack import LocalStack
from spillway_stack.ports import is_free
from spillway_stack.processes import ProcessIdentity, wait_gone
from spillway_stack.settings import StackSettings
from spillway_stack.state_folder import StateFolder
from spillway_stack.status_table import render_status

DEADLINE_SECONDS = 120.0

# Answers /ready, and ends on SIGTERM only after having written its name into the order of stops.
SERVER = """
import http.server, os, signal, sys
name, port, stops = sys.argv[1], int(sys.argv[2]), sys.argv[3]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "2"); self.end_headers(); self.wfile.write(b"{}")
    def log_message(self, *_): pass
def stop(*_):
    with open(stops, "a") as file: file.write(name + "\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
http.server.HTTPServer.allow_reuse_address = True
print(name, "listens", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def server(name: str, stops: Path, stop_rank: int) -> Component:
    port = free_port()
    arguments = [sys.executable, "-c", SERVER, name, str(port), str(stops)]
    return Component(name, arguments, port, "/ready", (port,), stop_rank, stop_timeout_seconds=60)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.02)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    stops = tmp_path / "stops"
    components = [server("valkey", stops, 2), server("engine-0", stops, 1), server("gateway", stops, 0)]
    made = LocalStack(StackSettings(engines=1), tmp_path / "run", components=components)
    with contextlib.closing(made):
        yield made


def pids(stack: LocalStack) -> list[ProcessIdentity]:
    return [status.identity for status in stack.status() if status.identity is not None]


def supervisor(stack: LocalStack) -> ProcessIdentity:
    identity = ProcessIdentity.from_record((stack.folder.read_state() or {})["supervisor"])
    assert identity is not None
    return identity


def test_down_stops_in_order_and_leaves_nothing(stack: LocalStack, tmp_path: Path) -> None:
    assert stack.start()
    stack.wait_ready(DEADLINE_SECONDS)
    processes, ports = [*pids(stack), supervisor(stack)], [status.port for status in stack.status()]
    stack.close()

    assert (tmp_path / "stops").read_text().split() == ["gateway", "engine-0", "valkey"]
    assert len(processes) == 4
    assert not any(process.is_alive() for process in processes)
    assert all(is_free(port) for port in ports)
    assert stack.folder.read_state() is None
    assert stack.status() == []


def test_closing_twice_is_harmless(stack: LocalStack) -> None:
    stack.start()
    stack.close()
    stack.close()

    assert stack.status() == []


def test_a_second_start_changes_nothing(stack: LocalStack) -> None:
    stack.start()
    stack.wait_ready(DEADLINE_SECONDS)
    before = pids(stack)

    assert stack.start() is False
    assert pids(stack) == before


def test_other_settings_are_refused_with_the_difference(stack: LocalStack) -> None:
    stack.start()
    other = LocalStack(StackSettings(engines=3), stack.folder.root, components=[])

    with pytest.raises(StackDiffers, match=r"engines: 1 -> 3.*make down"):
        other.start()


def test_down_works_without_the_supervisor(stack: LocalStack) -> None:
    stack.start()
    stack.wait_ready(DEADLINE_SECONDS)
    processes = pids(stack)
    supervisor(stack).signal(signal.SIGKILL)
    wait_gone([supervisor(stack)], DEADLINE_SECONDS)
    assert all(process.is_alive() for process in processes)
    stack.close()

    assert not any(process.is_alive() for process in processes)


def test_a_start_after_a_killed_supervisor_stops_its_components_first(stack: LocalStack) -> None:
    stack.start()
    stack.wait_ready(DEADLINE_SECONDS)
    old = pids(stack)
    supervisor(stack).signal(signal.SIGKILL)
    wait_gone([supervisor(stack)], DEADLINE_SECONDS)

    assert stack.start() is True
    stack.wait_ready(DEADLINE_SECONDS)
    assert not any(process.is_alive() for process in old)


def test_a_killed_engine_comes_back_and_is_counted(stack: LocalStack) -> None:
    stack.start()
    stack.wait_ready(DEADLINE_SECONDS)
    before = stack.status()[1].identity
    stack.kill_engine(0)
    stack.wait_engine_ready(0, DEADLINE_SECONDS, not_process=before)
    status = stack.status()[1]

    assert status.restarts == 1
    assert status.exits[-1]["code"] == -signal.SIGKILL
    assert "engine-0 ended with -9" in (stack.folder.logs / "supervisor.log").read_text()


def test_a_restart_is_no_failure_and_waits_for_the_successor(stack: LocalStack) -> None:
    stack.start()
    stack.wait_ready(DEADLINE_SECONDS)
    before = stack.status()[1].identity
    stack.restart_engine(0, DEADLINE_SECONDS)
    status = stack.status()[1]

    assert status.identity is not None and status.identity != before
    assert status.exits[-1]["code"] == 0


def test_a_component_that_cannot_start_is_reported_with_its_reason(tmp_path: Path) -> None:
    broken = Component(
        "engine-0",
        [sys.executable, "-c", "print('spillway_engine: no room; set X'); raise SystemExit(2)"],
        free_port(),
        "/ready",
    )
    stack = LocalStack(StackSettings(engines=1), tmp_path / "run", components=[broken])
    with contextlib.closing(stack):
        stack.start()
        with pytest.raises(ComponentFailed) as failed:
            stack.wait_ready(DEADLINE_SECONDS)

    assert str(failed.value).startswith(
        "engine-0 ended with status 2 before it was ready: no room; set X\nlast lines of "
    )


def test_a_stubborn_component_is_killed_at_its_deadline(tmp_path: Path) -> None:
    stubborn = """
import signal, socket, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True: signal.pause()
"""
    port = free_port()
    component = Component("engine-0", [sys.executable, "-c", stubborn, str(port)], port, None, (port,), 0, 0.5)
    stack = LocalStack(StackSettings(engines=1), tmp_path / "run", components=[component])
    stack.start()
    stack.wait_ready(DEADLINE_SECONDS)
    processes = pids(stack)
    stack.close()

    assert not any(process.is_alive() for process in processes)


def test_orphans_of_an_exited_component_are_reaped(tmp_path: Path) -> None:
    """The supervisor adopts orphans; unreaped they would stay in the process table as zombies."""
    program = """
import os, signal, socket, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
open(sys.argv[2], "a").write(f"{child.pid}\\n")
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
signal.pause()
"""
    port, children = free_port(), tmp_path / "children"
    component = Component("engine-0", [sys.executable, "-c", program, str(port), str(children)], port, None, (port,))
    stack = LocalStack(StackSettings(engines=1), tmp_path / "run", components=[component])
    with contextlib.closing(stack):
        stack.start()
        stack.wait_ready(DEADLINE_SECONDS)
        orphan = int(children.read_text().split()[0])
        stack.kill_engine(0)
        wait_until(lambda: not Path(f"/proc/{orphan}").exists())


def test_the_commands_of_the_makefile(stack: LocalStack, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["--state-dir", str(stack.folder.root)]
    not_running = command_line.main([*at, "status"])
    stack.start()
    stack.wait_ready(DEADLINE_SECONDS)
    running = command_line.main([*at, "status"])
    logs = command_line.main([*at, "logs", "engine-0"])
    unknown = command_line.main([*at, "logs", "engine-7"])
    down = command_line.main([*at, "down"])
    again = command_line.main([*at, "down"])
    shown = capsys.readouterr()

    assert (not_running, running, logs, unknown, down, again) == (1, 0, 0, 1, 0, 0)
    assert "engine-0 listens" in shown.out
    assert "no log of 'engine-7'" in shown.err
    assert shown.out.rstrip().endswith("nothing was running")


def test_the_table_shows_why_something_is_not_ready(stack: LocalStack) -> None:
    stack.start()
    stack.wait_ready(DEADLINE_SECONDS)
    ready = render_status(stack.status())
    (stack.status()[0].identity or supervisor(stack)).signal(signal.SIGKILL)
    # Seen in one look: a moment later the supervisor has started it again.
    wait_until(lambda: "valkey: ended" in render_status(stack.status()))

    assert ready.splitlines()[0].split() == ["component", "state", "pid", "port", "memory", "uptime", "restarts"]


def test_state_of_a_folder_without_a_stack(tmp_path: Path) -> None:
    assert StateFolder(tmp_path).read_state() is None
    assert LocalStack(StackSettings(), tmp_path).status() == []
