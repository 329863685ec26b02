"""Fixtures of tests that need vLLM 0.30 or newer: `.venv/vllm-0.32/bin/python -m pytest tests/stock_tiers`.

On an interpreter with an older vLLM the folder is left out.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from valkey_servers import own_servers

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("vllm.v1.kv_offload.config") is None:
    collect_ignore_glob = ["test_*.py"]
# vLLM reads it once; the block keys of two engines agree only if it is the same.
os.environ.setdefault("PYTHONHASHSEED", "0")


@pytest.fixture(scope="session", autouse=True)
def plugins() -> None:
    """Register the plugin, as each process of vLLM does at its start; test_registration.py tests the entry point."""
    from spillway_connector.engine.stock.registration import register

    register()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from stock_tiers.scheduler_side import build_model

    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def own_valkey() -> Iterator[Callable[[], Any]]:
    with own_servers() as start:
        yield start


@pytest.fixture(params=["nvme", "redis"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Mapping[str, Any]:
    """One entry of secondary_tiers, on an empty medium."""
    from stock_tiers.patience import PATIENT

    if request.param == "nvme":
        return {"type": "spillway-nvme", "path": str(tmp_path / "kv"), "max_bytes": "256 MiB", **PATIENT}
    server = request.getfixturevalue("own_valkey")()
    return {"type": "spillway-redis", "url": f"redis://127.0.0.1:{server.port}/0", **PATIENT}


@pytest.fixture
def open_side(model: Path) -> Iterator[Callable[..., Any]]:
    """Opens scheduler sides and closes those that are left."""
    from stock_tiers.scheduler_side import SchedulerSide

    sides: list[Any] = []

    def start(*tiers: Mapping[str, Any], model: Path = model, **settings: Any) -> Any:
        side = SchedulerSide.open(model, tiers, **settings)
        sides.append(side)
        return side

    try:
        yield start
    finally:
        for side in sides:
            side.close()
