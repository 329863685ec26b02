"""The whole under load on real engines: one after another system, four engines each. device.md says how to carry it.

    PYTHONPATH=bench:... python -m system.device_run --model FOLDER [--systems vllm_offload_pinned spillway_cpu ...]
        [--engines 4] [--sessions 64 ...] [--seconds 75] [--device-blocks 800] [--cpu-gib 24] [--load-format dummy]
        [--engine-set KEY=VALUE ...] [--gateway-set KEY=VALUE ...] [--kill-after SECONDS] [--label NAME] [--rounds 3]
        [--tiny]

Each system: start the engines and what routes, warm them up, load, read their counters, end them. Prints the table of
`make bench-system` and adds to OUTPUT its keys. Logs, configurations, answers and counters stay in WORK/<system>. With
several numbers of sessions the loads follow each other on the same engines, which keep what the load before has left;
no session goes on in the next load. The names of keys and folders then end with the number of sessions.
`--rounds` runs all systems at once, several on each GPU, and gives them the loads in turns: in each round every system
gets each load, the next round the other way round. A system that waits costs the others nothing but memory. Figures are
the medians of the rounds, and WORK/rounds.json has each of them.
`--kill-after` ends the last engine with SIGKILL so many seconds after the load has begun, and adds the figures of what
was sent from then on (`..._after_kill`).
`--tiny` is the same on CPU engines, with a small model and a small load: it shows that everything starts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Timer
from typing import Any

from system.load_generator import read_answers
from system.report import Answered, figures

READY_SECONDS_MAX = 300.0
FREED_SECONDS_MAX = 60.0
WARM_SECONDS = 6.0
RAMP_SECONDS = 8.0
BLOCK_TOKENS = 128
GPU_MEMORY_SHARE = 0.9  # of all engines of a GPU
PORTS_OF_SYSTEM = 200  # more than `Ports` gives
WATCHDOG = b"spillway_engine.watchdog"
GRAPH_SIZES = [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64]
PERFORMANCE = [
    "--max-num-batched-tokens=8192",
    "--max-num-seqs=64",
    "--compilation-config="
    + json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": GRAPH_SIZES}),
]
COUNTED = (
    "spillway_",
    "vllm:prompt",
    "vllm:prefix",
    "vllm:external",
    "vllm:num_preemptions",
    "vllm:request_",
    "vllm:time_to_first",
    "vllm:inter_token",
    "vllm:iteration",
)  # histograms: their sums and counts
_SERIES = re.compile(r"([a-zA-Z_:][\w:]*)(\{[^}]*\})? ([-+0-9.eE]+)$")


@dataclass(frozen=True, slots=True)
class RealSystem:
    """connector: vLLM's, by its name and settings; None for none. shared: Spillway's shared tier."""

    way: str  # of the load generator
    spillway: bool = False
    router: bool = False
    shared: str = "none"
    storing: str = "auto"  # of Spillway's engines
    connector: str | None = None
    lazy: bool = False


SYSTEMS = {
    "vllm_round_robin": RealSystem("turns"),
    "vllm_offload_router": RealSystem("one", router=True, connector="OffloadingConnector"),
    "vllm_offload_pinned": RealSystem("pinned", connector="OffloadingConnector"),
    "vllm_simple_pinned": RealSystem("pinned", connector="SimpleCPUOffloadConnector"),
    "vllm_lazy_pinned": RealSystem("pinned", connector="SimpleCPUOffloadConnector", lazy=True),
    "spillway_cpu": RealSystem("one", spillway=True),
    "spillway_pinned": RealSystem("pinned", spillway=True),
    "spillway_nvme": RealSystem("one", spillway=True, shared="nvme"),
    "spillway_nvme_late": RealSystem("one", spillway=True, shared="nvme", storing="late"),
}


class Ports:
    """All ports of a run, from a first one: engines, their events and replays, what routes and its metrics."""

    def __init__(self, first: int) -> None:
        self._first = first
        self.router = first + 90
        self.router_metrics = first + 91

    def engine(self, at: int) -> int:
        return self._first + at

    def events(self, at: int) -> int:
        return self._first + 30 + at

    def replay(self, at: int) -> int:
        return self._first + 60 + at

    def nixl(self, at: int) -> int:
        return self._first + 92 + at

    def gateway(self, at: int) -> int:
        """The port of one of several gateways; the first one is the router."""
        return self._first + 110 + at if at else self.router


def device_arguments(options: argparse.Namespace) -> list[str]:
    """Arguments of vLLM for an engine that may use `gpu_memory_share` of its GPU."""
    share = f"--gpu-memory-utilization={options.gpu_memory_share:.3f}"
    return [*PERFORMANCE, share, f"--load-format={options.load_format}"]


def engine_document(options: argparse.Namespace, system: RealSystem, folder: Path, at: int) -> dict[str, Any]:
    """spillway_engine's configuration file of one engine. folder: of the system, whose engines share its NVMe tier."""
    ports = Ports(options.first_port)
    shared: dict[str, Any] = {"type": system.shared}
    if system.shared == "nvme":
        shared["nvme"] = {"path": str(folder / "nvme"), "maxBytes": options.nvme_max}
    document: dict[str, Any] = {
        "name": f"engine-{at}",
        "model": {"path": str(options.model), "servedName": "model", "maxLength": options.max_length},
        "host": "127.0.0.1",
        "port": ports.engine(at),
        "blockSize": BLOCK_TOKENS,
        "deviceBlocks": options.device_blocks,
        "kvEvents": {"enabled": True, "port": ports.events(at), "replayPort": ports.replay(at)},
        "offload": {
            "enabled": True,
            "cpuBytes": f"{int(options.cpu_gib * 1024)}MiB",
            "storing": system.storing,
            "sharedTier": shared,
        },
        "lifecycle": {"selfCheck": "off", "drainDelaySeconds": 0, "drainTimeoutSeconds": 5},
        "extraArgs": [] if options.tiny else device_arguments(options),
    }
    if options.tiny:
        document["platform"] = "cpu"
    return document


def engine_command(options: argparse.Namespace, name: str, folder: Path, at: int) -> list[str]:
    """Starts one engine of the system."""
    system = SYSTEMS[name]
    if system.spillway:
        file = folder / f"engine-{at}.yaml"
        file.write_text(json.dumps(engine_document(options, system, folder, at), indent=1), encoding="utf-8")
        sets = [part for each in options.engine_set for part in ("--set", each)]
        return [sys.executable, "-m", "spillway_engine", "--config", str(file), *sets]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(options.model)]
    command += ["--served-model-name=model", "--host=127.0.0.1", f"--port={Ports(options.first_port).engine(at)}"]
    command += [f"--max-model-len={options.max_length}", "--seed=0", f"--block-size={BLOCK_TOKENS}"]
    command += [f"--num-gpu-blocks-override={options.device_blocks}", "--enable-prompt-tokens-details"]
    command += ["--prefix-caching-hash-algo=sha256_cbor", "--disable-uvicorn-access-log"]
    if options.tiny:
        command += ["--enforce-eager", f"--kv-cache-memory-bytes={400 << 20}"]
    else:
        command += ["--dtype=bfloat16", *device_arguments(options)]
    if system.connector is not None:
        extra: dict[str, Any] = {"cpu_bytes_to_use": int(options.cpu_gib * 2**30)}
        if system.lazy:
            extra["lazy_offload"] = True
        transfer = {"kv_connector": system.connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
        command.append(f"--kv-transfer-config={json.dumps(transfer)}")
    return command


def gateway_document(options: argparse.Namespace) -> dict[str, Any]:
    """spillway_gateway's configuration file."""
    ports = Ports(options.first_port)
    engines = [
        {
            "name": f"engine-{at}",
            "url": f"http://127.0.0.1:{ports.engine(at)}",
            "kvEvents": f"tcp://127.0.0.1:{ports.events(at)}",
            "kvReplay": f"tcp://127.0.0.1:{ports.replay(at)}",
        }
        for at in range(options.engines)
    ]
    document: dict[str, Any] = {
        "listen": {"host": "127.0.0.1", "port": ports.router},
        "models": [{"name": "model", "tokenizer": str(options.model), "engines": engines}],
    }
    for each in options.gateway_set:
        path, _, value = each.partition("=")
        *parents, last = path.split(".")
        at_level = document
        for parent in parents:
            at_level = at_level.setdefault(parent, {})
        with suppress(ValueError):
            value = json.loads(value)
        at_level[last] = value
    return document


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def counters(page: str) -> dict[str, float]:
    """Sums of a metrics page by series and labels that matter: tiers, results and reasons."""
    sums: dict[str, float] = {}
    for line in page.splitlines():
        match = _SERIES.match(line)
        if match is None or match[1].endswith(("_bucket", "_created")):
            continue
        if match[1].startswith(COUNTED):
            labels = re.sub(r'(engine|model_name|name|pid|process)="[^"]*",?', "", match[2] or "")
            sums[match[1] + labels] = sums.get(match[1] + labels, 0.0) + float(match[3])
    return sums


class Processes:
    """Processes of one system, each with its own process group and its own log."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            environment = {**os.environ, **(variables or {})}
            self._running[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def kill(self, name: str) -> None:
        """Ends a process and all that it started, as a lost node does."""
        os.killpg(self._running[name].pid, signal.SIGKILL)

    def halt(self, name: str) -> None:
        """Stops an engine with all its processes, so that its connections stay open and silent."""
        for group in self._groups(name):
            os.killpg(group, signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        """Lets what was halted go on."""
        for group in self._groups(name):
            os.killpg(group, signal.SIGCONT)

    def _groups(self, name: str) -> list[int]:
        """The process groups of an engine; its watchdog, which has to act if the engine ends, has one of its own."""
        parent = self._running[name].pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="utf-8").split()
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        engines = {os.getpgid(int(pid)) for pid, line in lines.items() if WATCHDOG not in line}
        return [parent, *sorted(engines - {parent})]

    def terminate(self, name: str) -> None:
        """Ask a process to end, as Kubernetes asks the first one of a container."""
        self._running[name].terminate()

    def wait(self, name: str) -> None:
        """Waits for the end of a process and of its group, which holds ports and memory until then."""
        process = self._running[name]
        process.wait()
        self._wait_for_group(process.pid)

    def __contains__(self, name: str) -> bool:
        return name in self._running

    def log_end(self, name: str) -> str:
        lines = (self._folder / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"   | {line[:240]}" for line in lines[-20:])

    def wait_ready(self, urls: Mapping[str, str]) -> None:
        """Raises SystemExit, with the ends of the logs, if a process ends or is not ready in time."""
        waiting = dict(urls)
        until = time.monotonic() + READY_SECONDS_MAX
        while waiting:
            for name, url in list(waiting.items()):
                code = self._running[name].poll()
                if code is not None or time.monotonic() > until:
                    why = "is not ready" if code is None else f"ended with {code}"
                    raise SystemExit(f"{name} {why}; the end of its log:\n{self.log_end(name)}")
                with suppress(OSError, urllib.error.URLError):
                    read(url)
                    del waiting[name]
            time.sleep(0.3)

    def end(self, seconds_max: float) -> None:
        """Ends all processes: what has not ended by itself after `seconds_max` is killed."""
        for process in self._running.values():
            if process.poll() is None:
                process.terminate()
        until = time.monotonic() + seconds_max
        for process in self._running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
        for process in self._running.values():  # also what an ended process has left behind in its group
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for process in self._running.values():
            self._wait_for_group(process.pid)

    @staticmethod
    def _wait_for_group(group: int) -> None:
        """A killed engine holds its device memory, which the next one needs, until its pinned memory is freed."""
        until = time.monotonic() + FREED_SECONDS_MAX
        with suppress(ProcessLookupError):
            while time.monotonic() < until:
                os.killpg(group, 0)
                time.sleep(0.1)


def generate_load(
    options: argparse.Namespace, urls: Sequence[str], way: str, output: Path, *, sessions: int, seed: int
) -> int:
    """One load to its end. seed 0: the warm-up. Returns how many requests failed."""
    warm = seed == 0
    command = [sys.executable, "-m", "system.load_generator", "--urls", ",".join(urls), "--way", way]
    command += ["--tokenizer", str(options.model / "tokenizer.json"), "--output", str(output), f"--seed={seed}"]
    command += [f"--sessions={sessions}", f"--grace-seconds={options.grace_seconds}"]
    command += [f"--seconds={WARM_SECONDS if warm else options.seconds}"]
    command += [f"--ramp-seconds={0.2 if warm else options.ramp_seconds}", f"--think-seconds={0.05 if warm else 1.0}"]
    command += [f"--tokens={options.tokens}", f"--turns={3 if warm else options.turns}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(f"   {'warm-up' if warm else 'load'}: {done.stdout.strip()}", flush=True)
    counts = json.loads(done.stdout)
    if warm and not counts["answered"]:
        raise SystemExit("no request of the warm-up was answered")
    return int(counts["failed"])


def after_kill(answered: Sequence[Answered], options: argparse.Namespace) -> dict[str, float]:
    """The figures of what was sent after the kill, over the seconds that were left."""
    late = [
        replace(
            one, sent_seconds=one.sent_seconds - options.kill_after, end_seconds=one.end_seconds - options.kill_after
        )
        for one in answered
        if one.sent_seconds >= options.kill_after
    ]
    values = figures(late, options.seconds - options.kill_after, 0.0)
    return {f"{figure}_after_kill": value for figure, value in values.items()}


@dataclass(frozen=True, slots=True)
class Running:
    """A system whose engines are warm. urls: get the requests. folder: holds its logs."""

    key: str
    system: RealSystem
    processes: Processes
    folder: Path
    engine_urls: Sequence[str]
    urls: Sequence[str]


def run_load(
    options: argparse.Namespace, running: Running, *, folder: Path, sessions: int, seed: int
) -> dict[str, float]:
    """Give a system one load and return its figures.

    Args:
        folder: Gets the answers and counters.
        seed: The loads on the same engines differ in it, and so in all their texts: none finds what another has left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = [counters(read(f"{url}/metrics")) for url in running.engine_urls]
    kill = Timer(options.kill_after or 0.0, running.processes.kill, [f"engine-{options.engines - 1}"])
    living = running.engine_urls
    if options.kill_after is not None:
        kill.start()
        living = running.engine_urls[:-1]
    try:
        answers = folder / "answers.jsonl"
        failed = generate_load(options, running.urls, running.system.way, answers, sessions=sessions, seed=seed)
    finally:
        kill.cancel()
    after = [counters(read(f"{url}/metrics")) for url in living]
    total = {
        key: sum(page.get(key, 0.0) - first.get(key, 0.0) for page, first in zip(after, before, strict=False))
        for key in sorted({key for page in after for key in page})
    }
    (folder / "counters.json").write_text(json.dumps(total, indent=1), encoding="utf-8")
    if "gateway" in running.processes:
        (folder / "gateway-metrics.txt").write_text(read(f"{running.urls[0]}/metrics"), encoding="utf-8")
    answered = read_answers(answers)
    values = figures(answered, options.seconds, options.ramp_seconds) | {"failed_requests": float(failed)}
    return values if options.kill_after is None else values | after_kill(answered, options)


@contextmanager
def running_system(options: argparse.Namespace, name: str) -> Iterator[Running]:
    """Start the engines of a system and what routes, warm them up, and end them."""
    system, ports = SYSTEMS[name], Ports(options.first_port)
    key = f"{name}_{options.label}" if options.label else name
    folder = options.work / key
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "nvme", ignore_errors=True)  # what an earlier run has stored would be found
    processes = Processes(folder)
    engine_urls = [f"http://127.0.0.1:{ports.engine(at)}" for at in range(options.engines)]
    router_url = f"http://127.0.0.1:{ports.router}"
    try:
        for at in range(options.engines):
            variables = {"PYTHONHASHSEED": "0", "VLLM_NO_USAGE_STATS": "1"}
            if not options.tiny:
                variables["CUDA_VISIBLE_DEVICES"] = str(at)
            processes.start(f"engine-{at}", engine_command(options, name, folder, at), variables)
        route = "/ready" if system.spillway else "/health"
        processes.wait_ready({f"engine-{at}": url + route for at, url in enumerate(engine_urls)})
        urls = engine_urls
        if system.spillway and system.way == "one":
            file = folder / "gateway.yaml"
            file.write_text(json.dumps(gateway_document(options), indent=1), encoding="utf-8")
            processes.start("gateway", [sys.executable, "-m", "spillway_gateway", "--config", str(file)])
            processes.wait_ready({"gateway": f"{router_url}/ready"})
            urls = [router_url]
        elif system.router:
            command = [sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1"]
            command += ["--port", str(ports.router), "--prometheus-port", str(ports.router_metrics)]
            processes.start("router", [*command, "--policy", "cache_aware", "--worker-urls", *engine_urls])
            processes.wait_ready({"router": f"{router_url}/health"})
            urls = [router_url]
        generate_load(options, engine_urls, "turns", folder / "warm.jsonl", sessions=2 * options.engines, seed=0)
        yield Running(key, system, processes, folder, engine_urls, urls)
    finally:
        processes.end(options.end_seconds)
        shutil.rmtree(folder / "nvme", ignore_errors=True)


def run_in_sequence(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """The key of each load of one system after the other, and its figures."""
    several = len(options.sessions) > 1
    for name in options.systems:
        with running_system(options, name) as running:
            for at, sessions in enumerate(options.sessions):
                folder = running.folder / str(sessions) if several else running.folder
                seed = options.seed + 1_000 * at
                values = run_load(options, running, folder=folder, sessions=sessions, seed=seed)
                yield f"{running.key}_{sessions}" if several else running.key, values


def run_in_rounds(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """The key of each load of systems that run at once, and the medians of its figures in the rounds until then."""
    rounds: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as stack:
        systems = []
        for at, name in enumerate(options.systems):  # vLLM measures the memory of a device while it starts
            own_ports = argparse.Namespace(**vars(options) | {"first_port": options.first_port + PORTS_OF_SYSTEM * at})
            systems.append(stack.enter_context(running_system(own_ports, name)))
        for number in range(options.rounds):
            for at, sessions in enumerate(options.sessions):
                seed = options.seed + 1_000 * (number * len(options.sessions) + at)
                for running in systems if number % 2 == 0 else reversed(systems):
                    folder = running.folder / f"{sessions}-{number}"
                    values = run_load(options, running, folder=folder, sessions=sessions, seed=seed)
                    key = f"{running.key}_{sessions}"
                    rounds.setdefault(key, []).append(values)
                    (options.work / "rounds.json").write_text(json.dumps(rounds, indent=1), encoding="utf-8")
                    yield key, {figure: statistics.median(each[figure] for each in rounds[key]) for figure in values}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json and a tokenizer")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=["vllm_offload_pinned", "spillway_cpu"])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--sessions", type=int, nargs="+", default=[64], help="at a time; one load for each number")
    parser.add_argument("--seconds", type=float, default=75.0, help="of each load")
    parser.add_argument("--grace-seconds", type=float, default=20.0, help="behind a load, for answers under way")
    parser.add_argument(
        "--end-seconds", type=float, default=20.0, help="of a system's processes, before they are killed"
    )
    parser.add_argument("--ramp-seconds", type=float, default=RAMP_SECONDS)
    parser.add_argument("--tokens", default="4000,6000,1000,64", help="common, own, of a turn, of an answer")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--kill-after", type=float, metavar="SECONDS", help="of the load; ends the last engine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--rounds", type=int, default=0, help="of all systems at once, in turns; 0: one after the other"
    )
    parser.add_argument("--device-blocks", type=int, default=800)
    parser.add_argument("--cpu-gib", type=float, default=24.0)
    parser.add_argument("--nvme-max", default="120GiB")
    parser.add_argument("--max-length", type=int, default=32_768)
    parser.add_argument("--load-format", default="dummy", help="dummy: random weights, which is as fast")
    parser.add_argument("--engine-set", action="append", default=[], metavar="KEY=VALUE", help="of Spillway's engines")
    parser.add_argument("--gateway-set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--label", default="", help="of this run's keys and folders, e.g. what was set")
    parser.add_argument("--work", type=Path, default=Path("build/bench/system"))
    parser.add_argument("--output", type=Path, default=Path("build/bench/system-device.json"))
    parser.add_argument("--first-port", type=int, default=18_100)
    parser.add_argument("--tiny", action="store_true", help="CPU engines, short prompts, few sessions")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.engines, options.turns = 2, 4
        options.sessions = [4 + at for at in range(len(options.sessions))]
        options.tokens, options.max_length, options.device_blocks, options.cpu_gib = "400,300,100,8", 4_096, 40, 0.5
        options.ramp_seconds, options.nvme_max = 2.0, "2GiB"
    options.work = options.work.absolute()
    options.gpu_memory_share = GPU_MEMORY_SHARE / (len(options.systems) if options.rounds else 1)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    written = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else {}
    began = time.monotonic()
    print(" ".join((*options.systems, options.label)), flush=True)
    for key, values in run_in_rounds(options) if options.rounds else run_in_sequence(options):
        written |= {f"{key}_{figure}": round(value, 4) for figure, value in values.items()}
        print(f"   {key}: " + ", ".join(f"{figure} {value:.4g}" for figure, value in values.items()))
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        print(f"   after {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
