"""A gateway beside a stack's own, over the same engines, with other settings."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import yaml

from .deadlines import eventually
from .running_stack import RunningStack, free_base_port


def stack_models(stack: RunningStack) -> list[dict[str, Any]]:
    """`models` of the stack's own gateway."""
    models: list[dict[str, Any]] = yaml.safe_load((stack.local.folder.config / "gateway.yaml").read_text())["models"]
    return models


@contextmanager
def other_gateway(stack: RunningStack, name: str, sections: dict[str, Any]) -> Iterator[str]:
    """Run another gateway and yield its address; the name is its log's too.

    sections: settings in place of those of the stack's own gateway.
    """
    folder = stack.local.folder
    config = yaml.safe_load((folder.config / "gateway.yaml").read_text())
    port = free_base_port()
    config["listen"]["port"] = port
    (folder.config / f"{name}.yaml").write_text(yaml.safe_dump({**config, **sections}))
    with folder.log_file(name).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "spillway_gateway", "--config", str(folder.config / f"{name}.yaml")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        eventually(f"{name} is ready", lambda: process.poll() is None and _is_ready(url))
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False
