"""One engine, as a pod runs it but for what the acceptance asks: no prefix cache on the device, so that every hit comes
through the transport."""

from __future__ import annotations

import dataclasses
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from spillway_engine.ascend_acceptance.client import EngineClient, EngineFailed
from spillway_engine.launch import EngineCommand, run_engine
from spillway_engine.machine import probe_machine
from spillway_engine.model_shape import load_model_shape
from spillway_engine.resolve import ResolvedEngine, resolve_engine
from spillway_engine.settings_reader import engine_settings, load_engine_settings

START_SECONDS = 3600.0
STOP_SECONDS = 120.0
LOG_TAIL_BYTES = 3000
_OURS = "spillway_engine.ascend_acceptance.engine"


def changed(tree: Mapping[str, Any], offload: Mapping[str, Any], port: int) -> dict[str, Any]:
    """A pod's configuration for one run: alone on this machine, with no tier but the CPU's."""
    kept = {key: value for key, value in tree.get("offload", {}).items() if key not in ("sharedTier", "extraTiers")}
    lifecycle = {"drainDelaySeconds": 0, "drainTimeoutSeconds": 1, "selfCheck": "off"}
    return {
        **tree,
        "name": "acceptance",
        "host": "127.0.0.1",
        "port": port,
        "dataParallelSize": 1,  # a request names no rank, and another one would not have its prefix
        "kvEvents": {"enabled": False},
        "offload": {**kept, "sharedTier": {"type": "none"}, **offload},
        "lifecycle": {**tree.get("lifecycle", {}), **lifecycle},
    }


def resolved(tree: Mapping[str, Any]) -> ResolvedEngine:
    """Raises EngineServiceError: what the engine would refuse to start with."""
    settings = engine_settings(tree)
    shape = load_model_shape(settings.model.path, settings.names)
    engine = resolve_engine(settings, shape, probe_machine(settings.platform))
    engine.require_fit()
    return engine


@contextmanager
def running(tree: Mapping[str, Any], offload: Mapping[str, Any], folder: Path, name: str) -> Iterator[EngineClient]:
    """folder: Holds the configuration and the log. Raises EngineFailed with the end of the log."""
    port = _free_port()
    configuration, log_file = folder / f"{name}.yaml", folder / f"{name}.log"
    configuration.write_text(yaml.safe_dump(changed(tree, offload, port), sort_keys=False))
    served_name = load_engine_settings(configuration).served_name
    with log_file.open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", _OURS, str(configuration)], stdout=log, stderr=log)
        try:
            _wait_ready(process, port, log_file)
            yield EngineClient(port, served_name)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(process: subprocess.Popen[bytes], port: int, log_file: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not _is_ready(port):
        if process.poll() is not None or time.monotonic() > deadline:
            state = "did not get ready" if process.returncode is None else f"ended with status {process.returncode}"
            tail = log_file.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
            raise EngineFailed(f"the engine {state}; the end of {log_file}:\n{tail}")
        time.sleep(1.0)


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def without_device_cache(command: EngineCommand) -> EngineCommand:
    """Add the argument that turns vLLM's prefix cache off. The engine service refuses it in production, as routing
    rests on the cache."""
    return dataclasses.replace(command, arguments=[*command.arguments, "--no-enable-prefix-caching"])


def main(configuration: Path) -> int:
    engine = resolved(yaml.safe_load(configuration.read_text()))
    print(engine.table(), flush=True)
    return run_engine(without_device_cache(engine.command()), log=lambda line: print(line, flush=True))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    sys.exit(main(Path(sys.argv[1])))
