"""Imports between rooms that are allowed. The table names every room and root module; a new one has to take its place
in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import NamedTuple

import pytest

import spillway_connector

PACKAGE = "spillway_connector"
ROOT = Path(spillway_connector.__file__).parent

SETTINGS = frozenset({"setting_names", "native_keys", "limits", "config"})
BOTTOM = SETTINGS | {"errors", "explanations", "metrics", "own_files", "cut_files", "namespace", "identity", "plan"}
TIERS = frozenset({"tiers", "tiers.disk", "tiers.disk.files", "tiers.disk.slab"}) | {
    "tiers.redis",
    "tiers.redis.client",
    "tiers.s3",
}
DEVICE = frozenset({"device", "device.cuda", "device.npu"})
SHARED = BOTTOM | TIERS | {"transfer", "vllm"}
ENGINE = SHARED | DEVICE | {"node", "torch"}
REQUESTS = frozenset({"engine.ipc", "engine.namespace", "engine.patches", "engine.requests"})
ROOMS = (
    REQUESTS
    | {"engine.generation", "engine.layouts", "engine.shared_tiers"}
    | {
        "engine.cpu_tier",
        "engine.node_tier",
        "engine.manager",
        "engine.features",
        "engine.scheduler",
        "engine.worker",
    }
)
GENERATION = ROOMS | {"engine.spec_base", "engine.connector_base"}
# A room is a root module or a folder, without what is named here below it. A room may always import itself. "vllm" and
# "torch" stand for these packages.
ALLOWED: Mapping[str, Set[str]] = {
    "": frozenset(),  # the package's own __init__
    "errors": frozenset(),
    "explanations": frozenset({"errors"}),
    "metrics": frozenset(),
    "own_files": frozenset(),
    "cut_files": frozenset(),
    "setting_names": frozenset(),
    "transfer_config": frozenset(),
    "native_keys": frozenset(),
    "limits": frozenset(),
    "namespace": frozenset({"errors"}),
    "plan": frozenset({"errors"}),
    "identity": frozenset({"errors", "own_files"}),
    "config": SETTINGS | {"errors", "plan"},
    "tiers": BOTTOM,
    "tiers.disk": BOTTOM | {"tiers"},
    "tiers.disk.files": BOTTOM | {"tiers", "tiers.disk"},
    "tiers.disk.slab": BOTTOM | {"tiers", "tiers.disk"},
    "tiers.redis": BOTTOM | {"tiers", "tiers.redis.client"},
    "tiers.redis.client": BOTTOM | {"tiers"},
    "tiers.s3": BOTTOM | {"tiers"},
    "transfer": BOTTOM | {"tiers"},
    "device": BOTTOM,
    "node": BOTTOM | {"device", "tiers", "tiers.disk", "tiers.disk.slab"},  # a lock and leases, as slabs have
    "device.cuda": BOTTOM | {"device", "torch"},
    "device.npu": BOTTOM | {"device"},
    "device.npu_probe": BOTTOM | {"device", "device.npu"},  # a command: python -m spillway_connector.device.npu_probe
    # The rooms of the engine. First what both processes use, then the scheduler's, then the worker's.
    "engine": frozenset(),  # the package's own __init__
    "engine.generation": BOTTOM | {"vllm"},
    "engine.patches": BOTTOM | {"engine.generation", "vllm"},
    "engine.ipc": BOTTOM | {"tiers", "vllm", "torch"},
    "engine.layouts": BOTTOM | {"device", "vllm", "torch"},
    "engine.namespace": BOTTOM | {"engine.patches", "vllm", "torch"},
    "engine.requests": BOTTOM | {"tiers", "engine.patches", "engine.namespace", "vllm"},
    "engine.shared_tiers": SHARED | {"engine.ipc", "engine.requests"},
    "engine.cpu_tier": BOTTOM | {"device", "transfer", "engine.requests", "vllm"},
    "engine.node_tier": BOTTOM | {"node", "transfer", "engine.cpu_tier", "vllm"},
    "engine.manager": BOTTOM | {"transfer", "engine.shared_tiers", "engine.cpu_tier", "vllm"} | REQUESTS,
    "engine.features": BOTTOM | {"engine.manager", "vllm"} | REQUESTS,
    "engine.scheduler": BOTTOM | {"engine.shared_tiers", "engine.manager", "engine.features", "vllm"} | REQUESTS,
    "engine.worker": BOTTOM | DEVICE | {"engine.ipc", "engine.layouts", "engine.namespace", "vllm"},
    # What joins the rooms, completed by one room a generation; then the two modules that choose one.
    "engine.spec_base": ENGINE | ROOMS - {"engine.features", "engine.scheduler"},
    "engine.connector_base": ENGINE | ROOMS | {"engine.spec_base"},
    "engine.v023": ENGINE | GENERATION,
    "engine.v030": ENGINE | GENERATION,
    # The tiers inside vLLM's own tiering, without Spillway's connector.
    "engine.stock": SHARED
    | {"engine.ipc", "engine.namespace", "engine.requests", "engine.shared_tiers", "engine.v030"},
    "engine.connector": frozenset({"engine.generation", "engine.v023", "engine.v030", "vllm"}),
    "engine.spec": frozenset({"engine.generation", "engine.v023", "engine.v030"}),
    # For tests and benchmarks: no other room imports it.
    "testing": BOTTOM | TIERS | DEVICE | {"transfer"},
    "testing.requests": {"vllm"},
    "testing.kv_caches": {"engine.v023", "vllm", "torch"},
    "testing.generation": BOTTOM | GENERATION | {"engine.v023", "engine.v030", "vllm"},
}
FOREIGN = ("vllm", "torch")


class Import(NamedTuple):
    line: int
    module: str  # within the package; or one of FOREIGN


def module_of(path: Path, root: Path = ROOT) -> str:
    """The dotted name within the package; "" for the package itself."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """The innermost room of the table that holds the module; None if there is none."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (room := ".".join(parts[:length])) in ALLOWED:
            return room
    return None


def imports_of(source: str, module: str, is_package: bool) -> Iterator[Import]:
    """Every import of this package and of FOREIGN: within functions and under TYPE_CHECKING, too."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = [PACKAGE, *(module.split(".") if module else [])]
                here = here[: len(here) - node.level + is_package]
                base = ".".join([*here, base] if base else here)
            # `from package import name`: the name may be a module or something in the package's __init__.
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            names = [str(given.value) for given in node.args[:1] if isinstance(given, ast.Constant)]
        for name in names:
            top, _, rest = name.partition(".")
            if top == PACKAGE:
                yield Import(node.lineno, rest)
            elif top in FOREIGN:
                yield Import(node.lineno, top)


def broken(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports of one module that the table does not allow, each as `line: message`."""
    room = room_of(module) if module else ""
    if room is None:
        return [f"0: {module} is in no room of the table"]
    allowed = ALLOWED[room] | {room}
    found = []
    for line, imported in imports_of(source, module, is_package):
        other = imported if imported in FOREIGN else room_of(imported)
        if other is None:
            found.append(f"{line}: {module} imports {imported}, which is in no room of the table")
        elif other not in allowed:
            found.append(f"{line}: {module} ({room}) imports {imported} ({other})")
    return found


def test_no_room_imports_against_the_arrows() -> None:
    problems = []
    for path in sorted(ROOT.rglob("*.py")):
        for problem in broken(path.read_text(), module_of(path), path.name == "__init__.py"):
            problems.append(f"{path.relative_to(ROOT)}:{problem}")
    assert problems == []


def test_every_room_of_the_table_is_there() -> None:
    modules = {module_of(path) for path in ROOT.rglob("*.py")}
    assert ALLOWED.keys() <= modules


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("plan.geometry", "from spillway_connector.config import ConnectorConfig"),
        ("config", "from spillway_connector.transfer.breaker import Breaker"),
        ("namespace", "from spillway_connector import tiers"),
        ("namespace", "import spillway_connector.tiers.frame as frame"),
        ("tiers.memory", "def late():\n    from spillway_connector.transfer import jobs"),
        ("tiers.disk.io", "from spillway_connector.device.copier import Copier"),
        ("tiers.disk.io", "from spillway_connector.tiers.redis.tier import RedisTier"),
        ("tiers.redis.tier", "from spillway_connector.tiers.disk import io"),
        ("tiers.disk.slab.tier", "from spillway_connector.tiers.disk.files.space import Space"),
        ("tiers.disk.files.tier", "from ..slab import index"),
        ("tiers.disk.layout_choice", "from spillway_connector.tiers.disk.slab.layout import SizeClassShape"),
        ("tiers.redis.client.pool", "from ..tier import RedisTier"),
        ("tiers.redis.client.pool", "import importlib\nimportlib.import_module('spillway_connector.engine.spec')"),
        (
            "transfer.jobs",
            "if TYPE_CHECKING:\n    from vllm.config import VllmConfig",
        ),
        ("transfer.jobs", "import vllm.config"),
        ("transfer.jobs", "import torch"),
        ("device.pinned", "from .npu.acl import Acl"),
        ("device.pinned", "from spillway_connector.tiers import tier"),
        ("device.npu.transport", "from spillway_connector.device.npu_probe import main"),
        ("device.npu.copier", "from spillway_connector.device.cuda import driver"),
        ("engine.v023.spec", "from spillway_connector.testing.clock import SteppedClock"),
        ("engine.namespace.weights", "from spillway_connector.engine.v023.scheduler import SpillwayConnectorScheduler"),
        ("engine.v023.worker", "from spillway_connector.engine.spec import SpillwayOffloadingSpec"),
        ("engine.v030.worker", "from spillway_connector.engine.v023.worker import SpillwayConnectorWorker"),
        ("engine.spec", "from spillway_connector.kitchen import sink"),
        ("engine.worker.copy_jobs", "from spillway_connector.engine.scheduler.half import SchedulerHalf"),
        ("engine.scheduler.half", "from spillway_connector.engine.worker.half import WorkerHalf"),
        ("engine.features.ahead", "from spillway_connector.engine.scheduler.half import SchedulerHalf"),
        ("engine.manager.tiering", "from ..features.late_stores import LateStores"),
        ("engine.cpu_tier.tier", "from spillway_connector.engine.manager.tiering import TieringManager"),
        ("engine.stock.tiers", "from spillway_connector.device.host_region import HostRegion"),
        ("kitchen.sink", ""),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert len(broken(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("config", "from spillway_connector.plan.copy_table import CopyTable"),
        ("transfer.jobs", "from spillway_connector import errors\nfrom spillway_connector.tiers.tier import Tier"),
        ("tiers.redis.client.pool", "from .connection import Connection\nimport json\nfrom ...tier import Tier"),
        (
            "engine.spec_base",
            "import torch\nfrom vllm.config import VllmConfig\nfrom ..device.cuda import driver",
        ),
        ("engine.connector", "from spillway_connector.engine.v023.connector import SpillwayConnector"),
    ],
)
def test_a_right_import_is_not(module: str, source: str) -> None:
    assert broken(source, module) == []
