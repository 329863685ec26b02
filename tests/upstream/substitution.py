"""A pytest plugin that puts Spillway's classes where vLLM's own tests name vLLM's.

It runs in the process that runs those tests (`-p upstream.substitution`). A substitution replaces one global of one of
their modules, after the module was imported; vLLM itself is not patched. A global that is not there is an error, so
that a test that was renamed is not mistaken for one that passes.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TABLE_ENV = "SPILLWAY_SUBSTITUTES"  # the module of this package with SUBSTITUTES

# File below `tests/v1` -> global in it -> from what it is to what it becomes.
Substitutes = Mapping[str, Mapping[str, Callable[[Any], Any]]]


class NoSuchGlobal(Exception):
    """vLLM's test module does not have what is to be replaced."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Put the substitutes in once every module of the run is imported."""
    table: Substitutes = importlib.import_module(f"upstream.{os.environ[TABLE_ENV]}").SUBSTITUTES
    for module in list(sys.modules.values()):
        substitutes = table.get(_place(module, Path(session.config.rootpath)), {})
        for name, replace in substitutes.items():
            if not hasattr(module, name):
                raise NoSuchGlobal(f"{module.__file__} has no {name}; see tests/upstream")
            setattr(module, name, replace(getattr(module, name)))


def _place(module: ModuleType, root: Path) -> str:
    file = getattr(module, "__file__", None)
    folder = root / "tests" / "v1"
    return Path(file).relative_to(folder).as_posix() if file and Path(file).is_relative_to(folder) else ""


@pytest.fixture
def default_vllm_config() -> Iterator[Any]:
    """The fixture that vLLM's tests expect of their repository's root conftest.py, which imports half of vLLM."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config
