"""The pod's parent process: starts vLLM as a process group of its own, watches it, drains it and cleans up after it.

One thread and one selector: the engine's output, its exit (a pidfd), the line to the middleware and signals are events
of one loop, and each phase has one deadline.
"""

from __future__ import annotations

import ctypes
import enum
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from spillway_engine.exit_report import OutputTail, exit_code_of, explain_exit
from spillway_engine.pod_channel import REFUSED_EXIT_CODE, MessageBuffer, PodBrief, encode_message
from spillway_engine.replica_lines import BEAT_SECONDS, FurtherLine, LeaderLines
from spillway_engine.settings import LifecycleSettings
from spillway_engine.shared_memory import files_of_group, group_members, sweep_stale_regions
from spillway_engine.watchdog import dismiss_watchdog, end_group, is_resource_tracker, start_watchdog
from spillway_settings.byte_sizes import format_byte_count
from spillway_settings.values.engine import LINES_PORT

SELF_CHECK_EXIT_CODE = 4
LATE_EXIT_CODE = 5
LOST_EXIT_CODE = 6
DRAIN_REPLY_SECONDS = 10.0  # beyond delay and timeout: for aborting the last requests and saying so
HURRIED_REPLY_SECONDS = 7.0
FAREWELL_SECONDS = 2.0  # from the last answer until the end: gateways learn meanwhile that it comes
LEADER_LOOK_SECONDS = 1.0  # between two looks at the leader's port, and of one
FORWARDED_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Phase(enum.Enum):
    STARTING = "starting"  # no HTTP server yet: a stop needs no drain
    SERVING = "serving"
    DRAINING = "draining"  # the middleware ends the requests
    STOPPING = "stopping"  # vLLM has been asked to end
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """The command to run: pure data, so that a trivial program can stand in for vLLM."""

    arguments: Sequence[str]
    environment: dict[str, str]  # added to ours
    brief: PodBrief
    lifecycle: LifecycleSettings
    leader: tuple[str, int] | None = None  # host and port of the server, if this pod has ranks of another one's engine
    index: int = 0  # of this pod in its replica
    further_pods: int = 0  # that this one leads
    lines_port: int = LINES_PORT  # of the leader


def run_engine(command: EngineCommand, log: Callable[[str], None]) -> int:
    """Run until the engine has ended; returns the pod's exit code: 0 after an asked-for stop, else the engine's own.

    Must run in the main thread (signal handlers). `log` writes one line to the pod's log.
    """
    if command.leader is not None and answers(command.leader):
        log(late_text(command.leader))
        return LATE_EXIT_CODE
    # Orphans of the engine become our children, so that we can reap them, as pid 1 of a container or not.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    sweep = sweep_stale_regions()
    if sweep.removed:
        log(f"removed {len(sweep.removed)} shared-memory files of old engines ({format_byte_count(sweep.freed_bytes)})")
    with _SignalPipe() as signals:
        pod = _Pod(command, signals, log)
        try:
            return pod.run()
        finally:
            pod.close()


class _SignalPipe:
    """Turns signals into bytes on a socket for as long as the block lasts."""

    def __enter__(self) -> _SignalPipe:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        wanted = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, *FORWARDED_SIGNALS)
        self._old = {number: signal.signal(number, lambda *_: None) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self.reader.close()
        self._writer.close()


class _Pod:
    def __init__(self, command: EngineCommand, signals: _SignalPipe, log: Callable[[str], None]) -> None:
        self._lifecycle = command.lifecycle
        self._leader = command.leader
        self._leader_time = 0.0  # until when an asked-for stop waits for the leader's
        self._log = log
        self._phase = Phase.STARTING
        self._deadline: float | None = None
        self._asked_to_stop = False
        self._refusal: tuple[int, str] | None = None  # exit code and reason
        self._abandoned = False  # ranks of another pod are lost; vLLM cannot end by itself
        self._tail = OutputTail()
        self._messages = MessageBuffer()
        self._shared_memory: set[Path] = set()  # of the whole group; after its end the owner of a file cannot be found
        self._control, theirs = socket.socketpair()
        with theirs:
            brief = structs.replace(command.brief, control_fd=theirs.fileno())
            self._engine = subprocess.Popen(
                list(command.arguments),
                env={**os.environ, **command.environment, **brief.to_environment()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                preexec_fn=_die_with_parent,  # noqa: PLW1509  this process has one thread
            )
        self._group_id = self._engine.pid
        self._watchdog = start_watchdog(self._group_id)
        assert self._engine.stdout is not None
        self._output_fd = self._engine.stdout.fileno()
        self._exit_fd = os.pidfd_open(self._engine.pid)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output_fd, selectors.EVENT_READ, self._on_output)
        self._selector.register(self._exit_fd, selectors.EVENT_READ, self._on_exit)
        self._selector.register(self._control, selectors.EVENT_READ, self._on_message)
        self._selector.register(signals.reader, selectors.EVENT_READ, lambda: self._on_signals(signals.reader))
        self._lines: LeaderLines | FurtherLine | None = None
        self._look_at: float | None = None  # at the lines
        if command.leader is not None:
            self._lines = FurtherLine((command.leader[0], command.lines_port), command.index)
        elif command.further_pods:
            self._lines = self._leader_lines(command)
        log(f"vLLM starts as process {self._engine.pid}")

    def run(self) -> int:
        while self._phase is not Phase.ENDED:
            due = [each for each in (self._deadline, self._look_at) if each is not None]
            timeout = max(0.0, min(due) - time.monotonic()) if due else None
            for key, _ in self._selector.select(timeout):
                key.data()
            if self._look_at is not None and time.monotonic() >= self._look_at:
                self._on_look()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._on_deadline()
        if isinstance(self._lines, FurtherLine):
            self._lines.close(failed=not self._asked_to_stop)
        elif self._lines is not None:
            self._lines.close()
        return self._conclude()

    def close(self) -> None:
        """End whatever is left of the group; harmless when nothing is."""
        end_group(self._group_id, self._shared_memory)
        self._engine.wait()
        self._reap_orphans()
        dismiss_watchdog(self._watchdog)
        self._selector.close()
        self._control.close()
        os.close(self._exit_fd)
        if self._engine.stdout is not None:
            self._engine.stdout.close()

    def _leader_lines(self, command: EngineCommand) -> LeaderLines | None:
        try:
            lines = LeaderLines(command.lines_port, command.further_pods, self._selector, self._on_pod_lost)
        except OSError as error:
            self._log(f"port {command.lines_port} is taken ({error.strerror}), so a lost pod is left to Kubernetes")
            return None
        self._look_at = time.monotonic() + BEAT_SECONDS
        return lines

    # Events

    def _on_look(self) -> None:
        assert isinstance(self._lines, LeaderLines)
        self._look_at = time.monotonic() + BEAT_SECONDS
        self._lines.look()

    def _on_pod_lost(self, index: int, what: str, failed: bool) -> None:
        """End the engine: the pod's ranks are lost to all others, which would wait for them without end. Requests are
        answered first, so that gateways take none for the cause of this end; one may be if that pod's engine failed."""
        if self._abandoned or self._phase in (Phase.STOPPING, Phase.ENDED):
            return
        self._refusal = (
            LOST_EXIT_CODE,
            f"pod {index} of this replica {what}, and no rank can do without its ranks. Ending with status "
            f"{LOST_EXIT_CODE}, so that the LeaderWorkerSet controller starts the whole replica again",
        )
        if failed or self._phase is Phase.STARTING:
            self._phase = Phase.STOPPING
            self._kill()
        else:
            self._abandoned = True
            self._phase = Phase.DRAINING
            self._deadline = time.monotonic() + HURRIED_REPLY_SECONDS
            self._order({"order": "abandon"})

    def _on_output(self) -> None:
        data = os.read(self._output_fd, 65_536)
        if not data:
            self._selector.unregister(self._output_fd)
            return
        self._tail.feed(data)
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def _on_exit(self) -> None:
        self._engine.wait()
        self._phase = Phase.ENDED

    def _on_message(self) -> None:
        try:
            data = self._control.recv(4096)
        except ConnectionResetError:  # it was killed with an order that it had not read
            data = b""
        if not data:
            self._selector.unregister(self._control)
            return
        for message in self._messages.feed(data):
            self._on_event(message)

    def _on_event(self, message: dict[str, Any]) -> None:
        event = message["event"]
        # Every process of the engine has its queues by now, before the first answer.
        self._shared_memory |= files_of_group(self._group_id)
        if event == "serving" and self._phase is Phase.STARTING:
            self._phase = Phase.SERVING
            if self._asked_to_stop:
                self._drain()
        elif event == "ready":
            self._log("ready")
        elif event == "self_check_failed" and self._phase is Phase.SERVING:
            self._refusal = SELF_CHECK_EXIT_CODE, str(message["reason"])
            self._stop()
        elif event == "refused":
            self._refusal = REFUSED_EXIT_CODE, str(message["reason"])
        elif event == "drained" and self._phase is Phase.DRAINING:
            stored = (
                f", {message['stored']} chunks stored, {message['left']} left behind" if message.get("stored") else ""
            )
            self._log(f"drained: {message['finished']} requests finished, {message['cancelled']} cancelled{stored}")
            if self._abandoned:
                self._deadline = time.monotonic() + FAREWELL_SECONDS
            else:
                self._stop()

    def _on_signals(self, reader: socket.socket) -> None:
        for number in reader.recv(64):
            if number in FORWARDED_SIGNALS:
                self._engine.send_signal(number)
            elif number == signal.SIGCHLD:
                self._reap_orphans()
            elif number in (signal.SIGTERM, signal.SIGINT):
                self._on_stop_signal(signal.Signals(number).name)

    def _on_stop_signal(self, name: str) -> None:
        if not self._asked_to_stop:
            self._asked_to_stop = True
            if self._phase is Phase.SERVING:
                self._log(f"{name}: draining (another {name} speeds it up)")
                self._drain()
            elif self._leader is not None:
                self._log(f"{name}: waiting for the leader's drain (another {name} ends the wait)")
                self._await_leader()
            elif self._phase is Phase.STARTING:
                self._log(f"{name}: stopping, the engine served nothing yet")
                self._stop()
        elif self._phase is Phase.DRAINING and self._leader is not None:
            self._stop()
        elif self._phase is Phase.DRAINING and not self._abandoned:
            self._log(f"{name} again: ending the running requests now")
            self._order({"order": "hurry"})
            self._deadline = time.monotonic() + HURRIED_REPLY_SECONDS
        else:
            self._log(f"{name} again: killing the engine")
            self._kill()

    def _on_deadline(self) -> None:
        if self._abandoned:
            self._kill()
        elif self._phase is Phase.DRAINING and self._leader is not None:
            if time.monotonic() < self._leader_time and answers(self._leader):
                self._deadline = time.monotonic() + LEADER_LOOK_SECONDS
            else:
                self._stop()
        elif self._phase is Phase.DRAINING:
            self._log("the drain gave no answer in time; stopping all the same")
            self._stop()
        else:
            self._log(f"vLLM did not end within {self._lifecycle.stop_timeout_seconds:g} s; killing it")
            self._kill()

    # Actions

    def _drain(self) -> None:
        lifecycle = self._lifecycle
        self._phase = Phase.DRAINING
        self._deadline = self._drain_end()
        self._order(
            {
                "order": "drain",
                "delay_seconds": lifecycle.drain_delay_seconds,
                "timeout_seconds": lifecycle.drain_timeout_seconds,
            }
        )

    def _drain_end(self) -> float:
        lifecycle = self._lifecycle
        return time.monotonic() + lifecycle.drain_delay_seconds + lifecycle.drain_timeout_seconds + DRAIN_REPLY_SECONDS

    def _await_leader(self) -> None:
        """The leader's requests need these ranks until its drain has ended; then its port is closed."""
        self._phase = Phase.DRAINING
        self._leader_time = self._drain_end()
        self._deadline = time.monotonic()

    def _order(self, order: dict[str, Any]) -> None:
        try:
            self._control.sendall(encode_message(order))
        except OSError:
            self._stop()

    def _stop(self) -> None:
        if self._phase in (Phase.STOPPING, Phase.ENDED):
            return
        self._phase = Phase.STOPPING
        self._deadline = time.monotonic() + self._lifecycle.stop_timeout_seconds
        self._engine.terminate()

    def _kill(self) -> None:
        self._deadline = None
        end_group(self._group_id, self._shared_memory)

    def _reap_orphans(self) -> None:
        """Reap ended descendants that became our children; the engine and the watchdog are waited for elsewhere."""
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for pid in map(int, children):
            if pid not in (self._engine.pid, self._watchdog.pid):
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    continue

    # Result

    def _conclude(self) -> int:
        self._read_rest()
        self._read_last_messages()
        strays = sum(not is_resource_tracker(pid) for pid in group_members(self._group_id))
        removed = end_group(self._group_id, self._shared_memory)
        if strays:
            self._log(f"ended {strays} processes that vLLM left running, removed {len(removed)} shared-memory files")
        # vLLM removes its region on a clean stop only; an unmapped one belongs to no running engine.
        sweep_stale_regions()
        if self._refusal is not None:
            exit_code, reason = self._refusal
            self._log(reason)
            return exit_code
        if self._asked_to_stop:
            self._log("stopped")
            return 0
        status = self._engine.returncode
        self._log(explain_exit(status, self._tail.lines()))
        return exit_code_of(status) or 1

    def _read_rest(self) -> None:
        os.set_blocking(self._output_fd, False)
        try:
            while data := os.read(self._output_fd, 65_536):
                self._tail.feed(data)
                sys.stdout.buffer.write(data)
        except BlockingIOError:
            pass
        sys.stdout.buffer.flush()

    def _read_last_messages(self) -> None:
        """Read the last messages of an engine that has ended, such as why it refused to start."""
        self._control.setblocking(False)
        try:
            while data := self._control.recv(4096):
                for message in self._messages.feed(data):
                    self._on_event(message)
        except (BlockingIOError, ConnectionResetError):
            pass


def late_text(leader: tuple[str, int]) -> str:
    """Explain why a further pod ends itself. vLLM's leader notices neither the loss of a rank in another pod nor its
    successor, and the LeaderWorkerSet controller recreates a replica when a container in it starts again."""
    host, port = leader
    return (
        f"the leader, {host}:{port}, serves already, so its ranks have met without this pod: it takes the place of one "
        f"that was lost, and no rank can join later. Ending with status {LATE_EXIT_CODE}, so that the LeaderWorkerSet "
        "controller starts the whole replica again"
    )


def answers(address: tuple[str, int]) -> bool:
    """Whether something listens there."""
    try:
        socket.create_connection(address, LEADER_LOOK_SECONDS).close()
    except OSError:
        return False
    return True


def _die_with_parent() -> None:
    """Let the API server get SIGKILL when the parent dies. Runs in the child between fork and exec.

    A second line of defence behind the watchdog, which also reaches the API server's own children.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def python_module(module: str, arguments: Sequence[str]) -> list[str]:
    """Run `module` with this interpreter, whatever PATH holds."""
    return [str(Path(sys.executable)), "-m", module, *arguments]
