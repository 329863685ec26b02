"""A gateway process under attack: how long one event loop iteration becomes, and what memory it costs.

Engines, gateway and another client are processes of their own; the attacker is the test. The gateway measures its event
loop in CPU time (probed_gateway.py), so other work on the machine adds nothing to it, and compares it with a reference
unit of work measured the same way in the same process. A hypervisor may still book an interruption as CPU time, so the
least disturbed of some rounds counts: a gateway that handles an attack in one iteration does so in each. A disturbed
machine is given time between rounds.

With `--stream-gaps` (`make bench-attack`) the other client's stream is timed too, beside the same stream read directly
from its engine: what delays both is the machine's load.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from stack_driver.deadlines import eventually

from .paced_stream import SECONDS_MAX, PacedStream

# CPU time of one event loop iteration, in reference units: about 50 ms where a unit takes 2.5 ms. A healthy gateway
# takes about 10 units at most under the attacks of this folder.
ITERATION_UNITS_MAX = 20.0
GAP_SECONDS_MAX = 0.050  # by which one request may delay another client's stream; only with --stream-gaps
ROUNDS = 8
PAUSE_SECONDS = 2.0  # after a disturbed round; longer after each further one
EVENT_SECONDS = 0.01
EVENTS = 60_000  # ten minutes
MODEL = "fake"  # what the attacker may ask: answered at once
PACED_MODEL = "paced"
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Harm:
    """Each of its least disturbed round. iteration_units: the process's CPU time between two timers of its event loop.
    grown_bytes: of the gateway's memory, from before the first round to the peak. added_gap_seconds: by which the other
    client's longest wait exceeded that of the stream beside the gateway; None: not measured."""

    iteration_units: float
    grown_bytes: int
    added_gap_seconds: float | None = None

    @property
    def is_bearable(self) -> bool:
        return self.iteration_units <= ITERATION_UNITS_MAX and (self.added_gap_seconds or 0.0) <= GAP_SECONDS_MAX

    def assert_bearable(self, grown_mib_max: int) -> None:
        assert self.is_bearable, (
            f"one event loop iteration took {self.iteration_units:.1f} units of CPU time, at most "
            f"{ITERATION_UNITS_MAX:.0f} allowed; another stream waited {self.added_gap_seconds} s longer"
        )
        assert self.grown_bytes <= grown_mib_max * MIB, f"{self.grown_bytes / MIB:.0f} MiB more memory"


class Target:
    """settings: top-level sections of the gateway's configuration. model, engine: further keys of the attacked
    model and of its engine. model_length: tokens that the attacked model takes. more_models: beside it. picker:
    proxies may ask it, on picker_port.
    descriptors: RLIMIT_NOFILE of the gateway. key: the other client's. gaps: time its stream."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any] | None = None,
        *,
        model: dict[str, Any] | None = None,
        engine: dict[str, Any] | None = None,
        descriptors: int | None = None,
        model_length: int = 100_000,
        more_models: Sequence[dict[str, Any]] = (),
        key: str = "",
        picker: bool = False,
        gaps: bool = False,
    ) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._streams: list[PacedStream] = []
        try:
            attacked = self._engine(MODEL, "--max-model-len", str(model_length))
            paced = self._engine(PACED_MODEL, words=EVENTS, slow_seconds=EVENT_SECONDS)
            models = [
                {"name": MODEL, "engines": [{"name": "fake-0", "url": attacked, **(engine or {})}], **(model or {})},
                {"name": PACED_MODEL, "engines": [{"name": "paced-0", "url": paced}]},
                *more_models,
            ]
            self._start_gateway(models, settings or {}, descriptors, picker=picker)
            self._through = self._stream(self.port, "through", key)
            self._beside = self._stream(int(paced.rpartition(":")[2]), "beside", key) if gaps else None
        except BaseException:
            self.close()
            raise

    def _start_gateway(
        self, models: Sequence[dict[str, Any]], settings: dict[str, Any], descriptors: int | None, *, picker: bool
    ) -> None:
        document = {
            "listen": {"host": "127.0.0.1", "port": 0, "opsPort": 0, **({"pickerPort": 0} if picker else {})},
            "models": list(models),
            **settings,
        }
        config = self._folder / "gateway.yaml"
        config.write_text(yaml.safe_dump(document), encoding="utf-8")
        limit = [] if descriptors is None else ["prlimit", f"--nofile={descriptors}:{descriptors}"]
        with (self._folder / "gateway.log").open("wb") as log:
            self._gateway = subprocess.Popen(
                [*limit, sys.executable, "-m", "attack.probed_gateway", "--config", str(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
            )
        self._processes.append(self._gateway)
        self.port = self._port_of("listening")
        self.ops_port = self._port_of("operations")
        self.picker_port = self._port_of("endpoint picker") if picker else 0
        eventually("the gateway is ready", self._ready, SECONDS_MAX)

    def _engine(self, model: str, *more: str, words: int = 4, slow_seconds: float = 0.0) -> str:
        command = [sys.executable, "-m", "spillway_gateway.testing.fake_engine_host", "--model", model]
        command += ["--name", f"{model}-0", "--words", str(words), "--slow-seconds", str(slow_seconds), *more]
        command += ["--no-tokenize-route"]  # so that no tokenizer of the gateway's is found to disagree
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self._processes.append(process)
        assert process.stdout is not None
        return process.stdout.readline().decode().split()[-1]

    def _stream(self, port: int, name: str, key: str) -> PacedStream:
        stream = PacedStream(port, PACED_MODEL, self._folder / f"{name}.times", key)
        self._streams.append(stream)
        return stream

    def _port_of(self, what: str) -> int:
        def found() -> int | None:
            log = self.log()
            assert self._gateway.poll() is None, log
            match = re.search(rf"{what} on (?:http|grpc)://\S+:(\d+)", log)
            return int(match.group(1)) if match else None

        return eventually(f"{what} on a port", found, SECONDS_MAX)

    def _ready(self) -> bool:
        return httpx.get(f"http://127.0.0.1:{self.ops_port}/ready", timeout=SECONDS_MAX).status_code == 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ops_url(self) -> str:
        return f"http://127.0.0.1:{self.ops_port}"

    def log(self) -> str:
        return (self._folder / "gateway.log").read_text(encoding="utf-8")

    def suffer(self, attack: Callable[[], object], rounds: int = ROUNDS) -> Harm:
        """Runs the attack until a round delayed the other client no more than is allowed, `rounds` times at most.

        Raises AssertionError if the other client's stream does not continue afterwards.
        """
        before = self._memory("VmRSS")
        self._reset_peak()
        units = gap = float("inf")
        for pause_seconds in [number * PAUSE_SECONDS for number in range(rounds)]:
            time.sleep(pause_seconds)
            since = time.monotonic()
            self._command("reset")
            attack()
            through = self._through.longest_gap(since)
            if self._beside is not None:
                gap = min(gap, through - self._beside.longest_gap(since))
            units = min(units, self._iteration_units())  # last, as the report itself holds the event loop
            harm = Harm(units, self._memory("VmHWM") - before, None if self._beside is None else gap)
            if harm.is_bearable:
                break
        return harm

    def hold(self, units: int) -> None:
        """Make the gateway spend so many reference units in one event loop iteration."""
        self._command(f"hold {units}")

    def _iteration_units(self) -> float:
        self._command("report")
        assert self._gateway.stdout is not None
        report = json.loads(self._gateway.stdout.readline())
        return float(report["iteration_seconds_max"] / report["reference_seconds"])

    def memory(self) -> int:
        """Bytes of the gateway's processes."""
        return self._memory("VmRSS")

    def _command(self, line: str) -> None:
        assert self._gateway.stdin is not None
        self._gateway.stdin.write(f"{line}\n".encode())
        self._gateway.stdin.flush()

    def _pids(self) -> list[int]:
        """The gateway's process and those it started."""
        pids = [self._gateway.pid]
        for pid in pids:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += map(int, children.read_text().split())
        return pids

    def _memory(self, field: str) -> int:
        """Bytes; VmHWM is the peak that the kernel itself kept."""
        total = 0
        for pid in self._pids():
            found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
            total += int(found.group(1)) * 1024 if found else 0
        return total

    def _reset_peak(self) -> None:
        for pid in self._pids():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # proc(5): resets VmHWM to the present size

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        for process in reversed(self._processes):
            process.kill()
            process.wait(SECONDS_MAX)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
