"""Engines, a process each, so that one can be killed or stopped alone, behind a gateway with continuation on."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from chaos.machines import SECONDS_MAX, Replica

MODEL = "simulated"
STEP_SECONDS = 0.02  # of a forward pass


class EngineProcess:
    """A simulator with one engine."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        settings = {"model": MODEL, "port": 0, "kvEventsPort": 0, "kvReplayPort": 0, "adminPort": 0}
        command = [sys.executable, "-m", "spillway_simulator", "--set", f"rates.stepSeconds={STEP_SECONDS}"]
        for key, value in settings.items():
            command += ["--set", f"{key}={json.dumps(value)}"]
        self._log = (folder / f"{name}.log").open("wb")
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log)
        assert self._process.stdout is not None
        addresses = json.loads(self._process.stdout.readline() or b"{}")
        assert addresses, f"the simulator did not start; see {self._log.name}"
        self._fault_url = addresses["admin"] + "/engines/*/fault"
        self.entry: dict[str, Any] = {**addresses["models"][0]["engines"][0], "name": name}

    def fault(self, fault: str, **settings: Any) -> None:
        reply = httpx.post(self._fault_url, json={"fault": fault, **settings}, timeout=SECONDS_MAX)
        assert reply.status_code == 200, reply.text

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self._process.kill()  # ends a stopped process too
        self._process.wait(SECONDS_MAX)
        self._log.close()


@contextlib.contextmanager
def running(folder: Path, engines: int) -> Iterator[tuple[list[EngineProcess], Replica]]:
    """The gateway is ready and knows every engine as up."""
    with contextlib.ExitStack() as stack:
        processes = [EngineProcess(f"engine-{number}", folder) for number in range(engines)]
        for process in processes:
            stack.callback(process.close)
        document = {
            "listen": {"host": "127.0.0.1", "port": 0, "opsPort": 0},
            "models": [{"name": MODEL, "engines": [process.entry for process in processes]}],
            # Silence alone tells of a hang here, not the polls, and a slow machine is not taken for one that often.
            "health": {"periodSeconds": 0.5, "timeoutSeconds": 5 * SECONDS_MAX},
            "timeouts": {"idleSeconds": 5 * SECONDS_MAX},
            "continuation": {"enabled": True, "stallSeconds": 2.0, "pauseSeconds": SECONDS_MAX, "attemptsMax": 10},
        }
        gateway = Replica("gateway", folder, document)
        stack.callback(gateway.close)
        gateway.start()
        yield processes, gateway
