"""The processes: one simulator that is all engines, and replicas of the gateway."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import yaml
from stack_driver.deadlines import eventually

from .tenants import MODEL

SECONDS_MAX = 120.0  # of any single wait: a machine with other work, not a slow product
ENGINES = 4
ANSWER_STEP_SECONDS = 0.15  # of a forward pass: streams last some seconds, so that each fault meets many


class Engines:
    def __init__(self, folder: Path, tokenizer: Path) -> None:
        settings = {
            "model": MODEL,
            "tokenizer": str(tokenizer),
            "engines": ENGINES,
            "port": 0,
            "kvEventsPort": 0,
            "kvReplayPort": 0,
            "adminPort": 0,
            "blockTokens": 16,
            "rates.stepSeconds": ANSWER_STEP_SECONDS,
        }
        command = [sys.executable, "-m", "spillway_simulator"]
        for key, value in settings.items():
            command += ["--set", f"{key}={json.dumps(value)}"]
        self._log = (folder / "engines.log").open("wb")
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log)
        assert self._process.stdout is not None
        addresses = json.loads(self._process.stdout.readline() or b"{}")
        assert addresses, f"the simulator did not start; see {self._log.name}"
        self._admin = httpx.Client(base_url=addresses["admin"], timeout=SECONDS_MAX)
        self.entries: list[dict[str, Any]] = addresses["models"][0]["engines"]

    @property
    def names(self) -> list[str]:
        return [entry["name"] for entry in self.entries]

    def fault(self, engine: str, fault: str, **settings: Any) -> None:
        reply = self._admin.post(f"/engines/{engine}/fault", json={"fault": fault, **settings})
        assert reply.status_code == 200, reply.text

    def state(self) -> dict[str, dict[str, Any]]:
        return {entry["name"]: entry for entry in self._admin.get("/engines").json()}

    def close(self) -> None:
        self._admin.close()
        self._process.terminate()
        self._process.wait(SECONDS_MAX)
        self._log.close()


class Replica:
    """One gateway process at a time. `lives` counts them."""

    def __init__(self, name: str, folder: Path, document: dict[str, Any]) -> None:
        self.name = name
        self._config = folder / f"{name}.yaml"
        self._config.write_text(yaml.safe_dump(document), encoding="utf-8")
        self._folder = folder
        self._engines = sum(len(model["engines"]) for model in document["models"])
        self._process: subprocess.Popen[bytes] | None = None
        self.lives = 0
        self.url = self.ops_url = ""
        self.taking = False  # as a Service sees it: new requests may be sent there

    def start(self) -> None:
        """Returns when it is ready."""
        self.lives += 1
        log = self._folder / f"{self.name}-{self.lives}.log"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "spillway_gateway", "--config", str(self._config)]
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=output)

        def address(what: str) -> str | None:
            assert self._process is not None and self._process.poll() is None, log.read_text(encoding="utf-8")
            found = re.search(rf"{what} on (http://\S+)", log.read_text(encoding="utf-8"))
            return found.group(1) if found else None

        self.url = eventually(f"{self.name} listens", lambda: address("listening"), SECONDS_MAX)
        self.ops_url = eventually(f"{self.name} has an operations port", lambda: address("operations"), SECONDS_MAX)
        eventually(f"{self.name} is ready", self._all_up, SECONDS_MAX)
        self.taking = True

    def _all_up(self) -> bool:
        return self.sum_of("spillway_gateway_engine_up") == self._engines

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def drain(self) -> int:
        """SIGTERM; its exit status once its last stream has ended."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        assert self._process is not None
        self.taking = False
        self._process.send_signal(number)
        return self._process.wait(SECONDS_MAX)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def samples(self, name: str) -> dict[str, float]:
        """Labels as text -> value, of one metric."""
        page = httpx.get(self.ops_url + "/metrics", timeout=SECONDS_MAX).text
        found = re.findall(rf"^{name}(\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
        return {labels: float(value) for labels, value in found}

    def sum_of(self, name: str) -> float:
        try:
            return sum(self.samples(name).values())
        except httpx.HTTPError:
            return -1.0

    def engine_up(self, engine: str) -> bool:
        return any(
            value == 1 for labels, value in self.samples("spillway_gateway_engine_up").items() if engine in labels
        )


def gateway_document(entries: list[dict[str, Any]], tokenizer: Path, auth: dict[str, str]) -> dict[str, Any]:
    return {
        "listen": {"host": "127.0.0.1", "port": 0, "opsPort": 0},
        "models": [{"name": MODEL, "tokenizer": str(tokenizer), "engines": entries}],
        "auth": auth,
        # All engines are one process here: what it is late for on a busy machine must not count as four engines down.
        "health": {"periodSeconds": 0.5, "timeoutSeconds": 15.0, "timeoutsBeforeDown": 2},
        "timeouts": {"idleSeconds": 60.0},
        # Engines fail right after one another here, so that one request may wait at each that does; by default it is
        # refused when three have failed with it, or two have ended.
        "limits": {"attemptsMax": ENGINES, "endedEnginesMax": ENGINES},
        "shutdown": {"drainTimeoutSeconds": SECONDS_MAX},
    }


def now() -> float:
    return time.monotonic()
