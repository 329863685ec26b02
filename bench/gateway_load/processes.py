"""Starts a router or the mock engines and measures CPU seconds and memory of the whole process tree."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from gateway_load.routers import Router, Start, python_path

START_SECONDS_MAX = 90.0
STOP_SECONDS_MAX = 10.0


class DidNotStart(Exception):
    """The message has the reason, in one line."""


class Cost(NamedTuple):
    cpu_seconds: float
    rss_bytes: int


def cost(process: subprocess.Popen[bytes]) -> Cost:
    """User and system time so far and resident memory now, with threads and children."""
    seconds, memory = 0.0, 0
    parent = psutil.Process(process.pid)
    for each in [parent, *parent.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            seconds += times.user + times.system
            memory += each.memory_info().rss
    return Cost(seconds, memory)


def free_ports(count: int) -> list[int]:
    """Distinct free ports."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            ports.append(int(listener.getsockname()[1]))
        return ports


@contextlib.contextmanager
def mock_engines(ports: list[int], tokenizer: Path, chunks: int, chunk_seconds: float) -> Iterator[None]:
    """One process that is all engines."""
    command = [sys.executable, "-m", "gateway_load.engine", "--ports", ",".join(map(str, ports))]
    command += ["--tokenizer", str(tokenizer), "--chunks", str(chunks), "--chunk-seconds", str(chunk_seconds)]
    environment = {**os.environ, "PYTHONPATH": python_path(Path(__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise DidNotStart("the mock engines did not start")
            yield
        finally:
            _stop(process)


def start_probing(targets: list[str]) -> subprocess.Popen[str]:
    """targets: PORT/PATH each."""
    command = [sys.executable, "-m", "gateway_load.probing", *targets]
    environment = {**os.environ, "PYTHONPATH": python_path(Path(__file__).parents[1])}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def end_probing(prober: subprocess.Popen[str]) -> None:
    assert prober.stdin is not None
    prober.stdin.close()


def probed_by(prober: subprocess.Popen[str]) -> list[tuple[list[float], int, float]]:
    """Return for each target: seconds of each probe, failures, and the largest delay of the prober's timer in
    seconds."""
    assert prober.stdout is not None
    if prober.stdout.readline() != "ready\n":
        raise DidNotStart("the prober did not start")
    return [(times, failed, late) for times, failed, late in json.loads(prober.stdout.readline())]


@contextlib.contextmanager
def running(router: Router, start: Start, folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A router that answers its health route. Raises DidNotStart."""
    for name, content in start.files.items():
        (folder / name).write_text(content, encoding="utf-8")
    log = folder / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            start.command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **start.environment},
        ) as process,
    ):
        try:
            _await_health(process, port, router.health, log)
            yield process
        finally:
            _stop(process)


def _await_health(process: subprocess.Popen[bytes], port: int, path: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        if answers(port, path, 1.0):
            return
        time.sleep(0.1)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    state = "ended" if process.poll() is not None else f"did not answer {path} within {START_SECONDS_MAX:g} s"
    raise DidNotStart(f"{state}: {lines[-1].strip()[:200] if lines else 'no output'}")


def answers(port: int, path: str, timeout_seconds: float) -> bool:
    """Whether a new connection gets a 200 in time, as a kubelet's probe requires."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_seconds)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and the children that it leaves."""
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS_MAX)
    if process.poll() is None:
        process.kill()
        process.wait()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
