"""`python -m spillway_stack up|status|logs|down|demo`, behind the make targets of the same names."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from spillway_engine.chat_answers import QUESTION
from spillway_stack.errors import StackError
from spillway_stack.first_answer import check_first_answer
from spillway_stack.local_stack import LocalStack
from spillway_stack.progress import ProgressDisplay
from spillway_stack.settings import StackSettings
from spillway_stack.state_folder import StateFolder, last_lines
from spillway_stack.status_table import render_status


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m spillway_stack",
        description="Runs all of Spillway on this machine. Environment: PORT, ENGINES, VLLM, MODEL, SHARED_TIER, "
        "OFFLOAD, NUM_CPU_BLOCKS, NODE_TIER, DEVICE_BLOCKS, MAX_LENGTH, DTYPE, GATEWAY_PROCESSES, ENGINE_ARGS (further "
        "arguments of vLLM), ENGINE_SET (key=value of the engine service).",
    )
    parser.add_argument(
        "--state-dir", type=Path, default=Path(".run"), help="logs, configuration, tiers (default .run)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="start everything, wait until it answers; quick when it already runs")
    commands.add_parser("down", help="end everything")
    commands.add_parser("status", help="table of components; status 0 only when all are ready")
    logs = commands.add_parser("logs", help="the ends of the logs")
    logs.add_argument("component", nargs="?", default="", help="one of them, e.g. engine-0 (default: all)")
    logs.add_argument("--lines", type=int, default=40, help="how many of each (default 40)")
    commands.add_parser("demo", help="measure what each tier saves on the running stack", add_help=False)
    given, rest = parser.parse_known_args(arguments)
    if given.command == "demo":
        # Imported lazily: it brings a plotting library that no other command needs.
        demo = importlib.import_module("spillway_stack.demo")
        return int(demo.main(["--state-dir", str(given.state_dir), *rest]))
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    folder = StateFolder(given.state_dir.resolve())
    try:
        if given.command == "up":
            return _up(folder)
        if given.command == "down":
            return _down(folder)
        if given.command == "status":
            return _status(folder)
        return _logs(folder, given.component, given.lines)
    except StackError as error:
        print(f"spillway: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("\nspillway: interrupted; `make down` ends what was started", file=sys.stderr, flush=True)
        return 130


def _up(folder: StateFolder) -> int:
    began = time.monotonic()
    settings = StackSettings.from_environment()
    display = ProgressDisplay()
    stack = LocalStack(settings, folder.root, log=display.write_line, show=display.show)
    started = stack.start()
    if not started and all(status.ready for status in stack.status()):
        display.write_line(f"already up: {stack.gateway_url}")
        return 0
    try:
        stack.wait_ready()
        display.finish()
        answer = check_first_answer(settings.gateway_port(), stack.model.served_name, stack.model.bundled)
    except StackError:
        display.finish()
        if started:
            # No half-started stack stays behind; the logs are kept.
            stack.close()
        raise
    display.write_line(
        f"\n{QUESTION} -> {answer.text.strip()!r}  "
        f"({answer.engine}, first token after {answer.first_token_seconds * 1000:.0f} ms)\n"
    )
    display.write_line(_next_steps(stack, time.monotonic() - began))
    return 0


def _next_steps(stack: LocalStack, seconds: float) -> str:
    url, name = stack.gateway_url, stack.model.served_name
    return f"""Spillway is up at {url} after {seconds:.0f} s (model {name}).

  curl {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}], "stream": true}}'

  make demo     what each tier saves, as a table and a chart
  make status   what runs          make logs   the ends of the logs  make down   end it"""


def _down(folder: StateFolder) -> int:
    stack = LocalStack(StackSettings(), folder.root, log=print)
    was_running = folder.read_state() is not None
    stack.close()
    print("down" if was_running else "nothing was running")
    return 0


def _status(folder: StateFolder) -> int:
    stack = LocalStack(StackSettings(), folder.root)
    statuses = stack.status()
    if not statuses:
        print("not running; start it with make up")
        return 1
    print(render_status(statuses))
    plan = folder.read_plan() or {}
    print(f"\nhttp://127.0.0.1:{plan.get('settings', {}).get('port', StackSettings().port)}")
    return 0 if all(status.ready for status in statuses) else 1


def _logs(folder: StateFolder, component: str, count: int) -> int:
    logs = sorted(folder.logs.glob("*.log")) if folder.logs.is_dir() else []
    if component:
        logs = [log for log in logs if log.stem == component]
        if not logs:
            known = ", ".join(sorted(log.stem for log in folder.logs.glob("*.log"))) or "none; run make up first"
            raise StackError(f"no log of {component!r} in {folder.logs}; there are: {known}")
    for log in logs:
        print(f"==> {log}")
        print("\n".join(last_lines(log, count)))
    if not logs:
        print("no logs; start the stack with make up")
    return 0


if __name__ == "__main__":
    sys.exit(main())
