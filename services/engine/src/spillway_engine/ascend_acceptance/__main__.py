"""`python3 -m spillway_engine.ascend_acceptance --config engine.yaml`, in the engine's container with an idle NPU.

Runs the probe, then three engines one after the other: without offload, with batched copies, and with a copy call for
each piece. Each answers the same prompts twice and holds the same conversations. Writes one JSON file; the exit status
is 0 if its verdict is `passed`, 1 if it is `failed`, 2 if nothing could be run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from spillway_engine.ascend_acceptance.answers import Answers, asked_twice, compared, prompts
from spillway_engine.ascend_acceptance.client import EngineClient, EngineFailed
from spillway_engine.ascend_acceptance.conversations import REPORTED, SMALL, Shape, converse, figures
from spillway_engine.ascend_acceptance.engine import changed, resolved, running
from spillway_engine.ascend_acceptance.probe import probe_figures, run_probe
from spillway_engine.ascend_acceptance.report import PATHS, concluded, versions
from spillway_engine.ascend_versions import read_ascend_versions
from spillway_engine.errors import EngineServiceError, SettingsError
from spillway_engine.settings_reader import engine_settings

METRICS = "spillway_device_copy"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m spillway_engine.ascend_acceptance")
    parser.add_argument("--config", type=Path, required=True, help="the engine's YAML file, as in its pod")
    parser.add_argument("--output", type=Path, default=Path("acceptance.json"))
    parser.add_argument("--device", type=int, default=0, help="of the probe, which needs one (default 0)")
    parser.add_argument("--megabytes", type=int, default=1024, help="of the probe, on each side (default 1024)")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 16], help="loads (default 8 and 16)")
    parser.add_argument("--prompts", type=int, default=16, help="whose answers are compared (default 16)")
    parser.add_argument("--prompt-tokens", type=int, default=2048, help="of each (default 2048)")
    parser.add_argument("--answer-tokens", type=int, default=16, help="of each (default 16)")
    parser.add_argument("--cpu-blocks", type=int, default=None, help="of the CPU tier, instead of the configuration's")
    parser.add_argument("--small", action="store_true", help="short conversations, to see that it runs")
    given = parser.parse_args(arguments)
    try:
        tree = yaml.safe_load(given.config.read_text())
        shape = fitting_shape(tree, given)
    except (OSError, yaml.YAMLError, EngineServiceError) as error:
        print(f"ascend_acceptance: {error}", file=sys.stderr)
        return 2
    report = concluded(measured(tree, given, shape))
    given.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['verdict']}; {given.output} has the figures")
    for reason in report["reasons"]:
        print(f"  {reason}")
    return int(report["verdict"] != "passed")


def fitting_shape(tree: Mapping[str, Any], given: argparse.Namespace) -> Shape:
    """The load, with token ids that the model has. Raises EngineServiceError if it cannot be asked for."""
    engine = resolved(changed(tree, {"enabled": False}, port=1))
    settings = engine.settings
    if not engine_settings(tree).offload.enabled:
        raise SettingsError(f"{settings.names.given('offload.enabled', False)}, and offload is what is tried; set true")
    shape = SMALL if given.small else REPORTED
    needed = max(shape.tokens_max, given.prompt_tokens + given.answer_tokens)
    if settings.model.max_length < needed:
        raise SettingsError(
            f"{settings.names.given('model.maxLength', settings.model.max_length)}, and the longest request has "
            f"{needed} tokens; set it to that, or give --small and a lower --prompt-tokens"
        )
    first, last = shape.vocabulary
    return replace(shape, vocabulary=(first, min(last, engine.shape.vocabulary or last)))


def measured(tree: Mapping[str, Any], given: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    library = engine_settings(tree).offload.acl_library_path
    report: dict[str, Any] = {"format": 1, "model": engine_settings(tree).model.path}
    report |= versions(read_ascend_versions(os.environ))
    print("probe", flush=True)
    report |= probe_figures(run_probe(library, given.device, given.megabytes))
    room = {} if given.cpu_blocks is None else {"numCpuBlocks": given.cpu_blocks, "cpuBytes": None}
    with tempfile.TemporaryDirectory(prefix="acceptance-") as folder:
        reference: Answers | None = None
        for name, offload in (
            ("no_offload", {"enabled": False}),
            *((f"batch_memcpy_{mode}", {"enabled": True, "batchMemcpy": mode, **room}) for mode in PATHS),
        ):
            print(name.replace("_", " "), flush=True)
            try:
                with running(tree, offload, Path(folder), name) as engine:
                    asked = prompts(engine, given.prompts, given.prompt_tokens)
                    answers = asked_twice(engine, asked, given.answer_tokens)
                    report |= {f"{name}_{key}": value for key, value in loads(engine, shape, given.clients).items()}
                    if reference is None:
                        reference = answers
                    else:
                        report |= {f"{name}_{key}": value for key, value in copies(engine).items()}
                        report |= {f"{name}_{key}": value for key, value in accuracy(reference, answers).items()}
            except (EngineFailed, OSError) as error:
                report[f"{name}_failed"] = str(error)
                if reference is None:
                    break
    return report


def accuracy(reference: Answers, answers: Answers) -> dict[str, Any]:
    different, seen, asked = compared(reference.first, answers)
    return {
        "answers_different": different,
        "answers_compared_share": round(seen / asked, 3),
        "answers_cached_tokens": answers.cached_tokens,
    }


def copies(engine: EngineClient) -> dict[str, Any]:
    paths = [path for path in PATHS.values() if engine.metric(f"{METRICS}_path", f'path="{path}"')]
    return {
        "copy_path": ", ".join(paths) or "none",
        "copy_failures": int(engine.metric(f"{METRICS}_failures_total")),
        "stored_bytes": int(engine.metric(f"{METRICS}_bytes_total", 'direction="store"')),
        "loaded_bytes": int(engine.metric(f"{METRICS}_bytes_total", 'direction="load"')),
        "pinned": bool(engine.metric("spillway_host_memory_pinned")),
    }


def loads(engine: EngineClient, shape: Shape, clients: Sequence[int]) -> dict[str, float]:
    report: dict[str, float] = {}
    for count in clients:
        turns, seconds = converse(lambda number, prompt: engine.turn(number, prompt, shape.answer), shape, count)
        report |= {f"{count}_clients_{key}": value for key, value in figures(turns, seconds).items()}
    return report


if __name__ == "__main__":
    sys.exit(main())
