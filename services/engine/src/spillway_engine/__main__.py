"""`python -m spillway_engine --config engine.yaml [--set key.path=value ...] [--print-config]`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from spillway_engine.errors import EngineServiceError
from spillway_engine.launch import run_engine
from spillway_engine.machine import probe_machine
from spillway_engine.model_shape import load_model_shape
from spillway_engine.resolve import resolve_engine
from spillway_engine.settings_reader import load_engine_settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 stopped as asked, 2 refused to start, 4 self-check failed, 5 too late for its replica, else the
    engine's own."""
    parser = argparse.ArgumentParser(
        prog="python -m spillway_engine", description="Run one engine pod: vLLM with KV offload."
    )
    parser.add_argument("--config", type=Path, help="YAML file; keys are the chart's values under `engine:`")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key, e.g. offload.numCpuBlocks=64"
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the resolved configuration and memory arithmetic as JSON, then exit",
    )
    given = parser.parse_args(arguments)
    try:
        settings = load_engine_settings(given.config, given.set)
        engine = resolve_engine(
            settings, load_model_shape(settings.model.path, settings.names), probe_machine(settings.platform)
        )
        if given.print_config:
            print(json.dumps(engine.public(), indent=2))
            return 0 if engine.budget.fits else BUDGET_EXIT_CODE
        print(engine.table(), flush=True)
        engine.require_fit()
        for problem in engine.warnings():
            print(f"spillway_engine: {problem}", file=sys.stderr, flush=True)
    except EngineServiceError as error:
        print(f"spillway_engine: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return run_engine(engine.command(), log=lambda line: print(f"spillway_engine: {line}", flush=True))


BUDGET_EXIT_CODE = 2

if __name__ == "__main__":
    sys.exit(main())
