"""Stamps of one request, in every process of an engine that was started with this folder on its PYTHONPATH.

Functions are wrapped as their modules are imported. Each stamp is one line of ``$STAMP_FILE``: process id, name, begin
and end on the machine's monotonic clock, all processes in one file. See ../first_token_stamps.py.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

# By module: (function, name of the stamp, whether a call is worth one by its arguments and its result).
Wanted = Callable[[tuple[Any, ...], Any], bool]


def _always(arguments: tuple[Any, ...], result: Any) -> bool:
    return True


def _something(arguments: tuple[Any, ...], result: Any) -> bool:
    return bool(result)


def _with_tokens(place: int) -> Wanted:
    """The scheduler's output is argument ``place``; the result's where it is negative."""
    return lambda arguments, result: (arguments[place] if place >= 0 else result).total_num_scheduled_tokens > 0


STAMPED: Mapping[str, Sequence[tuple[str, str, Wanted]]] = {
    "vllm.v1.engine.async_llm": [("AsyncLLM.add_request", "accepted", _always)],
    "vllm.v1.engine.output_processor": [("OutputProcessor.process_outputs", "output", _always)],
    "vllm.v1.engine.core": [
        ("EngineCore.add_request", "received", _always),
        ("EngineCoreProc._process_engine_step", "step", _always),
    ],
    "vllm.v1.core.sched.scheduler": [("Scheduler.schedule", "scheduled", _with_tokens(-1))],
    "vllm.v1.worker.gpu_worker": [
        ("Worker.execute_model", "forward", _with_tokens(1)),
        ("Worker.execute_model", "worker step", _always),
    ],
    "spillway_connector.engine.manager.early_loads": [("EarlyLoads.due", "piece sent", _something)],
    "spillway_connector.engine.worker.half": [("WorkerHalf._start_piece", "piece begun", _always)],
    "spillway_connector.transfer.lookups": [("TierLookups._answer_to", "lookup", _always)],
    "spillway_connector.transfer.shared_tier": [
        ("SharedTier.submit_load", "load submitted", _always),
        ("SharedTier.finished", "load ended", _something),
    ],
    "spillway_connector.transfer.movers": [("Movers._load", "block", _always)],
    "spillway_connector.device.cpu": [("copy_spans", "copy", _always)],
}


def _stamp(name: str, begun: float, ended: float) -> None:
    os.write(_FILE, f"{os.getpid()} {name.replace(' ', '_')} {begun:.6f} {ended:.6f}\n".encode())


def _wrapped(function: Callable[..., Any], name: str, wanted: Wanted) -> Callable[..., Any]:
    @functools.wraps(function)
    def stamped(*arguments: Any, **named: Any) -> Any:
        begun = time.monotonic()
        result = function(*arguments, **named)
        if wanted(arguments, result):
            _stamp(name, begun, time.monotonic())
        return result

    return stamped


def _wrap(module: ModuleType) -> None:
    for path, name, wanted in STAMPED[module.__name__]:
        owner: Any = module
        *classes, attribute = path.split(".")
        for part in classes:
            owner = getattr(owner, part)
        # Raises if the function has another name by now: a table without its row would look as if it were never called.
        setattr(owner, attribute, _wrapped(vars(owner)[attribute], name, wanted))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it wraps what the others load."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in STAMPED:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                assert spec.loader is not None
                spec.loader.exec_module = _then_wrap(spec.loader.exec_module)  # type: ignore[assignment, method-assign]
                return spec
        return None


def _then_wrap(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def execute_and_wrap(module: ModuleType) -> None:
        execute(module)
        _wrap(module)

    return execute_and_wrap


if "STAMP_FILE" in os.environ:
    _FILE = os.open(os.environ["STAMP_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    sys.meta_path.insert(0, _Finder())
