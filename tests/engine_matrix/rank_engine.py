"""One engine with two data parallel ranks through the engine service: its processes, requests to a rank, and events."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import msgspec
import yaml
import zmq
from free_ports import free_port
from reference_answers.margins import REQUEST, Scored, scored
from stack_driver.deadlines import eventually

from engine_matrix.engine_run import ANSWER_TOKENS
from engine_matrix.models import BLOCK_TOKENS, Model
from spillway_engine.shared_memory import files_of_group, group_members

RANKS = 2
SECONDS_MAX = 1500.0  # of its starts: a machine with other work, not a slow product
_PATIENT = {"lookupTimeoutSeconds": 60, "loadTimeoutSeconds": 60, "storeTimeoutSeconds": 60}
_COORDINATOR_IS_LATE = "DP Coordinator process failed to report ZMQ addresses"  # after 120 s: vLLM's own limit
_STARTS_MAX = 4  # on a machine so busy; a pod starts again, too
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


def ports() -> tuple[int, int, int]:
    """The port of HTTP, and the first of the ranks' ports for events and for replays."""
    found: list[int] = []
    while len(found) < 3:
        port = free_port()
        if all(abs(port - other) > RANKS for other in found):
            found.append(port)
    return found[0], found[1], found[2]


class RankEngine:
    """Started on entering; nothing of it is left on leaving."""

    def __init__(
        self,
        folder: Path,
        model_folder: Path,
        wanted: Model,
        module: str = "spillway_engine",
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """folder: for its configuration, its log and its shared tier. module: what is started, with the engine
        service's arguments. environment: added to this process's."""
        self._module, self._environment = module, {**os.environ, **environment}
        port, self._events_port, self._replay_port = ports()
        # One connection for each request: vLLM ends those of requests that it refuses.
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            timeout=SECONDS_MAX,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self._log, self._config = folder / "engine.log", folder / "engine.yaml"
        self._starts = 0
        tree = {
            "model": {"path": str(model_folder), "servedName": "m", "dtype": "float32", "maxLength": wanted.max_length},
            "port": port,
            "blockSize": BLOCK_TOKENS,
            "deviceBlocks": wanted.device_blocks,
            "dataParallelSize": RANKS,
            "kvEvents": {"port": self._events_port, "replayPort": self._replay_port},
            "offload": {
                "numCpuBlocks": wanted.small_cpu_blocks,
                "prefillTokensPerSecond": 0.001,  # loads happen whether they pay or not
                "requestWaitSeconds": 60,
                "sharedTier": {"type": "nvme", "nvme": {"path": str(folder / "kv"), "maxBytes": "1GiB"}, **_PATIENT},
            },
            # Random weights predict no sentence, and tokens are all that is asked and answered here.
            "lifecycle": {"selfCheck": "off", "drainDelaySeconds": 0},
            "extraArgs": ["--skip-tokenizer-init", "--max-num-seqs", "4"],
        }
        self._config.write_text(yaml.safe_dump(tree))
        self._zmq = zmq.Context()
        self._events = [self._socket(zmq.SUB, self._events_port + rank) for rank in range(RANKS)]
        for subscriber in self._events:
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")

    def __enter__(self) -> RankEngine:
        self._start()
        try:
            eventually("the engine is ready", self._is_ready, SECONDS_MAX)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for _attempt in range(2):  # the second one speeds the first one up
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=120)
        self._zmq.destroy(linger=0)
        self._http.close()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")[-8000:]

    def answer(self, prompt: list[int], rank: int) -> tuple[Scored, int]:
        """Answer a prompt, and count how many of its tokens came from a cache."""
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
        }
        reply = self._http.post("/v1/completions", json={**body, **REQUEST}, headers=_of(rank))
        assert reply.status_code == 200, reply.text
        answered = reply.json()
        details = answered["usage"].get("prompt_tokens_details") or {}
        return scored(answered["choices"][0]), details.get("cached_tokens") or 0

    def promote(self, prompt: list[int], rank: int | None) -> int:
        """The status of a hint."""
        hint = {"token_ids": prompt, "cache_salt": None}
        headers = {} if rank is None else _of(rank)
        return self._http.post("/spillway/promote", json=hint, headers=headers).status_code

    def counter(self, name: str, rank: int, **labels: str) -> float:
        """A counter of one rank, as vLLM shows it; 0 if it has not appeared."""
        page = self._http.get("/metrics").text
        wanted = {"engine": str(rank), **labels}.items()
        return sum(
            float(value)
            for found, value in re.findall(rf"^{name}\{{(.*)\}} (\S+)$", page, re.MULTILINE)
            if wanted <= dict(re.findall(r'(\w+)="([^"]*)"', found)).items()
        )

    def wait_stored(self, rank: int, size_bytes: float) -> None:
        """Wait until a rank has stored as many bytes; it computes a few tokens meanwhile, as counters move with
        steps."""

        def is_stored() -> bool:
            self.answer([3, 4, 5], rank)
            return self.counter("spillway_tier_written_bytes_total", rank) >= size_bytes

        eventually(f"rank {rank} has stored {size_bytes:.0f} bytes", is_stored)

    def events(self, rank: int) -> dict[int, Any]:
        """Number of a batch -> what the rank has published since the start."""
        found = {}
        while self._events[rank].poll(1000):
            _, number, payload = self._events[rank].recv_multipart()
            found[int.from_bytes(number, "big")] = msgspec.msgpack.decode(payload)
        return found

    def replayed(self, rank: int) -> dict[int, Any]:
        """The same, asked for."""
        dealer = self._socket(zmq.DEALER, self._replay_port + rank)
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        found = {}
        while dealer.poll(60_000):
            _, number, payload = dealer.recv_multipart()[-3:]
            if number == _END_OF_REPLAY:
                return found
            found[int.from_bytes(number, "big")] = msgspec.msgpack.decode(payload)
        raise AssertionError(f"the replay of rank {rank} has no end after {len(found)} batches")

    def kill_rank(self, rank: int) -> tuple[int, set[Path], list[int]]:
        """SIGKILL its engine core: the service's exit status, and shared memory and processes that are left."""
        group = self._group()
        shared = files_of_group(group)
        cores = [pid for pid in group_members(group) if _command(pid).startswith(f"VLLM::EngineCore_DP{rank}")]
        assert len(cores) == 1, [_command(pid) for pid in group_members(group)]
        os.kill(cores[0], signal.SIGKILL)
        status = self._process.wait(timeout=SECONDS_MAX)
        return status, {file for file in shared if file.exists()}, group_members(group)

    def _group(self) -> int:
        """The process group that the API server leads."""
        parent = self._process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        (server,) = [int(pid) for pid in children if "openai.api_server" in _command(int(pid))]
        return os.getpgid(server)

    def _start(self) -> None:
        self._starts += 1
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, "--config", str(self._config)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _is_ready(self) -> bool:
        if self._process.poll() is not None:
            assert _COORDINATOR_IS_LATE in self.log and self._starts < _STARTS_MAX, self.log
            self._start()
            return False
        try:
            return self._http.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def _socket(self, kind: int, port: int) -> Any:
        made = self._zmq.socket(kind)
        made.connect(f"tcp://127.0.0.1:{port}")
        return made


def _of(rank: int) -> dict[str, str]:
    return {"x-data-parallel-rank": str(rank)}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
