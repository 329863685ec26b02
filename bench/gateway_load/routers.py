"""The routers under test: where each comes from, how it is installed, and how it is started. One process each.

Other routers have an environment each below ~/.cache/spillway/rivals, created on first use with uv. One that cannot be
installed is left out, with the reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import yaml

from gateway_load.prompts import MODEL

HOME = Path(os.environ.get("SPILLWAY_RIVALS", "~/.cache/spillway/rivals")).expanduser()
INSTALL_SECONDS_MAX = 900
LITELLM_KEY = "sk-" + "bench" * 8  # not NUMBER, which is replaced in each request
BODIES_BYTES_EACH = 128 * 1024 * 1024  # limits.bodiesBytesMax of each of two processes by default
PRODUCTION_STACK_COMMIT = "a6c01db05f65f556235413ba8dbcfb0c01132fff"
PRODUCTION_STACK_URL = "https://github.com/vllm-project/production-stack"


def sources(checkout: Path = Path()) -> str:
    """The gateway's own code before everything else, as PYTHONPATH has it."""
    return python_path(*((checkout / folder / "src").absolute() for folder in ("gateway", "settings")))


def python_path(*folders: Path) -> str:
    """Put these folders before those of PYTHONPATH."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


class CannotInstall(Exception):
    """The message has the reason, in one line."""


@dataclass(frozen=True, slots=True)
class Start:
    """Recipe that starts a router. files: name -> content, written into its folder. key: what callers must send."""

    command: list[str]
    files: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Router:
    """start: from (its folder, its port, another free port, engines' ports)."""

    name: str
    install: Callable[[], Path]
    start: Callable[[Path, Path, int, int, Sequence[int]], Start]
    health: str = "/health"
    operations: bool = False  # start() gives the other port to an operations listener


def routers(
    tokenizer: Path | None,
    index_bytes: int | None = None,
    pythons: Sequence[Path] = (),
    processes: Sequence[int] = (),
    picker_port: int | None = None,
) -> list[Router]:
    """All of them, Spillway first. tokenizer: a model folder; None leaves Spillway to match by text. pythons: other
    interpreters, and processes: numbers of processes, with each of which Spillway is a row of its own.
    picker_port: of Spillway's endpoint picker; None: it has none."""

    def spillway(
        python: Path, folder: Path, port: int, other: int, engines: Sequence[int], *, processes: int = 1
    ) -> Start:
        names = [{"name": f"engine-{at}", "url": f"http://127.0.0.1:{engine}"} for at, engine in enumerate(engines)]
        model = {"name": MODEL, "tokenizer": str(tokenizer) if tokenizer else None, "engines": names}
        document: dict[str, object] = {
            "listen": {"host": "127.0.0.1", "port": port, "opsPort": other, "pickerPort": picker_port},
            "models": [model],
            "processes": processes,
        }
        if picker_port is not None:  # proxies see the health service's answer before it goes; the chart's default
            document["shutdown"] = {"drainDelaySeconds": 1}
        if processes > 2:  # from four on, the default leaves each too small a share for one long body, and is refused
            document["limits"] = {"bodiesBytesMax": processes * BODIES_BYTES_EACH}
        if index_bytes is not None:
            document["index"] = {"bytesMax": index_bytes}
        path = folder / "gateway.yaml"
        command = [str(python), "-m", "spillway_gateway", "--config", str(path)]
        return Start(command, {path.name: yaml.safe_dump(document)}, {"PYTHONPATH": sources()})

    own = Router("spillway", lambda: Path(sys.executable), spillway, "/ready", operations=True)
    versions = {python: _version_of(python) for python in pythons}
    return [
        own,
        *(
            Router(f"spillway, Python {version}", partial(_spillway, python, version), spillway, "/ready", True)
            for python, version in versions.items()
        ),
        *(
            Router(f"spillway, {number} processes", own.install, partial(spillway, processes=number), "/ready", True)
            for number in processes
        ),
        Router("vllm-router cache_aware", _vllm_router, _start_vllm_router("cache_aware")),
        Router("vllm-router round_robin", _vllm_router, _start_vllm_router("round_robin")),
        Router("sglang-router cache_aware", _sglang_router, _start_sglang_router),
        Router("production-stack prefixaware", _production_stack, _start_production_stack("prefixaware")),
        Router("litellm", _litellm, _start_litellm, "/health/liveliness"),
    ]


def _version_of(python: Path) -> str:
    ask = "import platform; print(platform.python_version())"
    return subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


# --- starting ---------------------------------------------------------------------------------------------------------


def _urls(engines: Sequence[int]) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in engines]


def _start_vllm_router(policy: str) -> Callable[[Path, Path, int, int, Sequence[int]], Start]:
    def start(python: Path, folder: Path, port: int, other: int, engines: Sequence[int]) -> Start:
        listen = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(other)]
        command = [str(python.with_name("vllm-router")), *listen, "--policy", policy, "--log-level", "warning"]
        return Start([*command, "--worker-urls", *_urls(engines)])

    return start


def _start_sglang_router(python: Path, folder: Path, port: int, other: int, engines: Sequence[int]) -> Start:
    listen = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(other)]
    command = [str(python.with_name("sglang-router")), "launch", *listen, "--policy", "cache_aware"]
    return Start([*command, "--log-level", "warn", "--worker-urls", *_urls(engines)])


def _start_production_stack(logic: str) -> Callable[[Path, Path, int, int, Sequence[int]], Start]:
    def start(python: Path, folder: Path, port: int, other: int, engines: Sequence[int]) -> Start:
        fleet = ["--static-backends", ",".join(_urls(engines)), "--static-models", ",".join([MODEL] * len(engines))]
        command = [str(python), "-m", "vllm_router.app", "--host", "127.0.0.1", "--port", str(port), *fleet]
        command += ["--service-discovery", "static", "--routing-logic", logic]
        source = HOME / _production_stack_name() / "source" / "src"
        return Start(
            [*command, "--engine-stats-interval", "15", "--log-level", "warning"],
            environment={"PYTHONPATH": str(source)},
        )

    return start


def _start_litellm(python: Path, folder: Path, port: int, other: int, engines: Sequence[int]) -> Start:
    models = [
        {
            "model_name": MODEL,
            "litellm_params": {"model": f"openai/{MODEL}", "api_base": url + "/v1", "api_key": "none"},
        }
        for url in _urls(engines)
    ]
    path = folder / "litellm.yaml"
    document = {"model_list": models, "router_settings": {"routing_strategy": "simple-shuffle"}}
    return Start(
        [str(python.with_name("litellm")), "--config", str(path), "--host", "127.0.0.1", "--port", str(port)],
        {path.name: json.dumps(document)},
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": LITELLM_KEY},
        LITELLM_KEY,
    )


# --- installing -------------------------------------------------------------------------------------------------------


def _spillway(python: Path, version: str) -> Path:
    """Install what the gateway imports, at the pinned versions, and return the interpreter. The gateway itself is there
    for its metadata alone; its code comes from sources()."""
    pinned = Path("requirements/gateway.txt")
    name = f"gateway-{version}-{hashlib.sha256(pinned.read_bytes()).hexdigest()[:8]}"
    own = ["--no-deps", "./settings", "./gateway"]
    return _environment(name, ["-r", str(pinned)], own, python=lambda: str(python))


def _vllm_router() -> Path:
    return _environment("vllm-router-0.1.17", ["vllm-router==0.1.17"])


def _sglang_router() -> Path:
    return _environment("sglang-router-0.3.2", ["sglang-router==0.3.2"])


def chinese_words() -> Path:
    """jieba's dictionary: a word, its frequency and its kind per line. Raises CannotInstall."""
    python = _environment("jieba-0.42.1", ["jieba==0.42.1"])
    return next(python.parents[1].glob("lib/python*/site-packages/jieba/dict.txt"))


def _litellm() -> Path:
    return _environment("litellm-1.106.2", ["litellm[proxy]==1.106.2"])


def _production_stack_name() -> str:
    return f"production-stack-{PRODUCTION_STACK_COMMIT[:7]}"


def _production_stack() -> Path:
    """Install the router from a checkout, with the versions that it pins. PyPI has another
    project, vllm-router, under its name."""
    name = _production_stack_name()
    source = HOME / name / "source"
    if not source.is_dir():
        source.parent.mkdir(parents=True, exist_ok=True)
        given = os.environ.get("PRODUCTION_STACK", PRODUCTION_STACK_URL)
        partial = source.with_name("partial")
        shutil.rmtree(partial, ignore_errors=True)
        _run(["git", "clone", "--quiet", given, str(partial)])
        _run(["git", "-C", str(partial), "checkout", "--quiet", PRODUCTION_STACK_COMMIT])
        partial.rename(source)
    requirements = source / "src" / "vllm_router" / "requirements.txt"
    return _environment(name, ["-r", str(requirements)], python=lambda: _python_from(3, 12))


def _environment(name: str, *packages: list[str], python: Callable[[], str] = lambda: sys.executable) -> Path:
    """Interpreter of the environment `name`; made with uv where it is missing. packages: what each call of it installs.
    Raises CannotInstall."""
    folder = HOME / name
    interpreter, whole = folder / "bin" / "python", folder / "installed"
    if not whole.exists():
        _run([_uv(), "venv", "--quiet", "--allow-existing", "--python", python(), str(folder)])
        for each in packages:
            _run([_uv(), "pip", "install", "--quiet", "--python", str(interpreter), *each])
        whole.touch()
    return interpreter


def _uv() -> str:
    own = Path(".venv/bootstrap/bin/uv")
    found = str(own) if own.exists() else shutil.which("uv")
    if found is None:
        raise CannotInstall("uv is missing; run `make install`, or put uv on PATH")
    return found


def _python_from(major: int, minor: int) -> str:
    """An interpreter of at least this version: PYTHON_RIVALS, this one, or one on PATH that starts."""
    if sys.version_info >= (major, minor):
        return sys.executable
    names = [f"python{major}.{newer}" for newer in range(minor, minor + 3)]
    for name in [os.environ.get("PYTHON_RIVALS", ""), *names]:
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    raise CannotInstall(f"needs Python {major}.{minor} or newer, on PATH or named by PYTHON_RIVALS")


def _run(command: list[str]) -> None:
    environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotInstall(f"{command[0]}: {error}") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise CannotInstall(f"{' '.join(command[:3])}: {lines[0].strip()}")
