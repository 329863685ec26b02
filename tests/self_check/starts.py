"""Many starts in little time: vLLM's server forked from a process that has imported it already.

Everything after the imports is repeated: engine core and worker are started, weights loaded, the KV cache allocated,
kernels warmed up, the server's application built with the middleware, whose check then runs.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from self_check.engine import MEASURED, REFUSED, START_SECONDS, Verdict, engine_tree
from spillway_engine.launch import EngineCommand
from spillway_engine.machine import probe_machine
from spillway_engine.model_shape import load_model_shape
from spillway_engine.resolve import resolve_engine
from spillway_engine.settings_reader import engine_settings
from spillway_engine.shared_memory import files_of_group
from spillway_engine.vllm_arguments import SERVER_MODULE
from spillway_engine.watchdog import end_group


def forked_start(folder: Path, model_folder: Path, settings: dict[str, Any]) -> Verdict:
    """Start, await the verdict, end. Raises AssertionError without a verdict."""
    resolved = engine_settings(engine_tree(model_folder, settings))
    shape = load_model_shape(resolved.model.path)
    command = resolve_engine(resolved, shape, probe_machine(resolved.platform)).command()
    _import_once(command)
    log = folder / "server.log"
    sys.stdout.flush()
    sys.stderr.flush()
    group = os.fork()
    if group == 0:
        _serve(command, log)
    try:
        return _await_verdict(group, log)
    finally:
        end_group(group, files_of_group(group))
        try:
            os.waitpid(group, 0)
        except ChildProcessError:
            pass


def _import_once(command: EngineCommand) -> None:
    """Import vLLM's server once, with the environment of an engine, which some modules read while they are imported."""
    if SERVER_MODULE not in sys.modules:
        os.environ.update({**command.environment, "PYTHONHASHSEED": "0"})
        __import__(SERVER_MODULE)


def _serve(command: EngineCommand, log: Path) -> None:
    """Serve in the child; never returns."""
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update({**command.environment, **command.brief.to_environment()})
        sys.argv = [SERVER_MODULE, *command.arguments[4:]]
        runpy.run_module(SERVER_MODULE, run_name="__main__", alter_sys=True)
    except BaseException:  # every error belongs in the log
        traceback.print_exc()
    finally:
        os._exit(1)


def _await_verdict(group: int, log: Path) -> Verdict:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        text = log.read_text(errors="replace") if log.exists() else ""
        if passed := MEASURED.search(text):
            return Verdict(True, passed[1])
        if refused := REFUSED.search(text):
            return Verdict(False, refused[1])
        ended, _ = os.waitpid(group, os.WNOHANG)
        assert ended == 0, f"the server ended without a verdict:\n{text[-4000:]}"
        time.sleep(0.2)
    raise AssertionError(f"no verdict within {START_SECONDS:.0f} s")
