"""One real engine through the engine service, without offload, that a test may break while it runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from stack_driver.running_stack import free_base_port

from spillway_engine.in_process import Reply
from spillway_engine.machine import probe_machine
from spillway_engine.model_shape import load_model_shape
from spillway_engine.pod_channel import PodBrief
from spillway_engine.resolve import resolve_engine
from spillway_engine.self_check import SelfCheckFailed, run_self_check
from spillway_engine.settings_reader import engine_settings

TESTS_FOLDER = Path(__file__).parents[1]
START_SECONDS = 900.0
MEASURED = re.compile(r"self-check passed: (.*)")
REFUSED = re.compile(r"(self-check failed: .*)")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The check's verdict on one engine."""

    healthy: bool
    message: str


def engine_tree(model_folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a small engine that can be broken; `settings` are added to it."""
    return {
        "port": free_base_port(),
        "kvEvents": {"enabled": False},
        "deviceBlocks": 16,
        "offload": {"enabled": False},
        **settings,
        "model": {"path": str(model_folder), "servedName": "m", "maxLength": 1024, **settings.get("model", {})},
        "extraArgs": ["--worker-extension-cls", "self_check.sabotage.Sabotage", *settings.get("extraArgs", [])],
        "extraEnv": {
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONPATH": os.pathsep.join((str(TESTS_FOLDER), os.environ.get("PYTHONPATH", ""))),
            **settings.get("extraEnv", {}),
        },
    }


class Engine:
    """Started on entering, ended on leaving. `verdict` is that of its own start."""

    def __init__(self, folder: Path, model_folder: Path, **settings: Any) -> None:
        """folder: for its configuration and log. settings: sections, added to what a small engine needs."""
        self.tree = engine_tree(model_folder, settings)
        self._config = folder / "engine.yaml"
        self.log = folder / "engine.log"
        self._url = f"http://127.0.0.1:{self.tree['port']}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Engine:
        self._config.write_text(yaml.safe_dump(self.tree))
        started = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "spillway_engine", "--config", str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )
        self.verdict = self._await_verdict(started + START_SECONDS)
        self.start_seconds = time.monotonic() - started
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        for _attempt in range(2):  # the second one speeds the first one up
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=60)

    def brief(self, **values: Any) -> PodBrief:
        """The check's brief at this engine's start; `values` are settings, as `--set` takes them."""
        overrides = [f"{path}={value}" for path, value in values.items()]
        settings = engine_settings(self.tree, overrides)
        shape = load_model_shape(settings.model.path)
        return resolve_engine(settings, shape, probe_machine(settings.platform)).command().brief

    async def check(self, brief: PodBrief) -> Verdict:
        """The start-up check once more, over HTTP."""
        try:
            return Verdict(True, await run_self_check(self._ask, brief))
        except SelfCheckFailed as error:
            return Verdict(False, str(error))

    async def order(self, method: str, *arguments: object) -> None:
        """One method of Sabotage in vLLM's worker."""
        async with httpx.AsyncClient(timeout=120) as client:
            reply = await client.post(
                f"{self._url}/collective_rpc", json={"method": method, "args": [str(value) for value in arguments]}
            )
        assert reply.status_code == 200, reply.text

    async def _ask(self, path: str, body: Mapping[str, Any]) -> Reply:
        async with httpx.AsyncClient(timeout=120) as client:
            reply = await client.post(f"{self._url}{path}", json=dict(body))
        return Reply(reply.status_code, reply.text)

    def _await_verdict(self, deadline: float) -> Verdict:
        assert self._process is not None
        while time.monotonic() < deadline:
            ended = self._process.poll() is not None
            text = self.log.read_text(errors="replace")
            if ended:
                refused = REFUSED.search(text)
                assert refused is not None, f"the engine ended without a verdict:\n{text[-4000:]}"
                return Verdict(False, refused[1])
            if passed := MEASURED.search(text):
                return Verdict(True, passed[1])
            time.sleep(0.2)
        raise AssertionError(
            f"no verdict within {START_SECONDS:.0f} s:\n{self.log.read_text(errors='replace')[-4000:]}"
        )
