"""The runs of a model, and the verdict on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reference_answers.margins import Scored, difference

from engine_matrix.greedy import scored_answers

_TESTS = Path(__file__).parents[1]
# Cases that must answer like the engine without offload, and must have loaded something.
_LAYERS = ("layers", "layers-failing", "layers-refused")
_MET = ("meet", "meet-async")
SAME = ("cpu", "chunks", "nvme", "nvme-other", "redis", "early", "failing", "npu", "npu-off", *_LAYERS, *_MET)


@dataclass
class Outcome:
    """The outcome of one model."""

    runs: dict[str, dict[str, Any]] = field(default_factory=dict)  # by case
    refusals: dict[str, str] = field(default_factory=dict)  # case -> the engine's error
    log: str = ""

    @property
    def loaded_tokens(self) -> int:
        """Tokens that came from a tier, in the first of the cases that load some: with a CPU tier alone, if it ran."""
        case = next((case for case in SAME if case in self.runs), "none")
        return sum(self.runs[case]["cached"]) - sum(self.runs["none"]["cached"])


def run_model(name: str, folder: Path, cases: list[str], timeout_seconds: float = 1800.0) -> Outcome:
    """All cases of a model."""
    return run_models([(name, cases)], folder, timeout_seconds)[name]


def run_models(
    wanted: Sequence[tuple[str, list[str]]], folder: Path, timeout_seconds: float = 1800.0
) -> dict[str, Outcome]:
    """One process for the cases of all these models, in this order; a model may come again with other cases. Never
    raises for what an engine does."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "engine_matrix.engine_run", str(folder)]
    command += [f"{name}:{','.join(cases)}" for name, cases in wanted]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_seconds, check=False
    )
    log = done.stdout[-4000:] + done.stderr[-12_000:]
    outcomes = {name: Outcome(log=log) for name, _ in wanted}
    for line in done.stdout.splitlines():
        kind, _, payload = line.partition(" ")
        if kind == "RUN":
            run = json.loads(payload)
            outcomes[run["model"]].runs[run["case"]] = run
        elif kind == "REFUSED":
            refusal = json.loads(payload)
            outcomes[refusal["model"]].refusals[refusal["case"]] = refusal["error"]
    for name, outcome in outcomes.items():
        missing = [case for of, cases in wanted if of == name for case in cases if case not in outcome.runs]
        if missing and not outcome.refusals:
            outcome.refusals[missing[0]] = f"the process ended with {done.returncode}"
        elif done.returncode and not any(other.refusals for other in outcomes.values()):
            outcome.refusals["end"] = f"the process ended with {done.returncode}"
    return outcomes


def run_each(wanted: Mapping[str, list[str]], folder: Path) -> dict[str, Outcome]:
    """The same, with another process for the cases behind one that ended its process."""
    found = {name: Outcome() for name in wanted}
    left = [(name, case) for name, cases in wanted.items() for case in cases]
    while left:
        asked = {name: [case for of, case in left if of == name] for name, _ in left}
        for name, outcome in run_models([*asked.items()], folder).items():
            found[name].runs |= outcome.runs
            found[name].refusals = outcome.refusals | found[name].refusals
            found[name].log += outcome.log
        left = [(name, case) for name, case in left if case not in found[name].runs][1:]
    return found


def faults(outcome: Outcome) -> list[str]:
    """List what is wrong with the runs; empty when offload changes no answer and the control shows that a change would
    be seen.

    An answer is right when the engine without offload gives it, computing the whole prompt (`none`) or, where that was
    run, behind a hit of its own (`device`), but for what rounding does (reference_answers.margins).
    """
    runs, found = outcome.runs, []
    reference = runs["none"]
    right = list(zip(scored_answers(reference), scored_answers(runs.get("device", reference)), strict=True))
    for case, run in runs.items():
        differing = _differing(right, run)
        if case in SAME and differing:
            found.append(f"{case}: answers {list(differing)} differ: {next(iter(differing.values()))}")
        # Of the copies of a load under its step every second one fails, so each of these loads does.
        if case in SAME and case != "layers-failing" and sum(run["cached"]) <= sum(reference["cached"]):
            found.append(f"{case}: nothing came from a tier")
        if case in SAME and not run["step_loads" if case in _LAYERS else "loads"]:
            found.append(f"{case}: nothing was loaded")
        if case in _LAYERS[1:] and not run["failed_step_loads"]:
            found.append(f"{case}: no load failed")
    for case in ("lossy", "layers-lossy"):
        if case in runs and not _differing(right, runs[case]):
            found.append(f"{case}: loads of zeroes change no answer, so the comparison proves nothing")
    for case in ("nvme", "nvme-other", "redis", "early", *_MET):
        if case in runs and not runs[case]["tier_read_bytes"]:
            found.append(f"{case}: nothing was read from the shared tier")
    for case in _MET:
        if case in runs and not runs[case]["jumps"]:
            found.append(f"{case}: no prompt met its load")
    if "early" in runs and not runs["early"]["early_parts"]:
        found.append("early: no load began before all of it had been read")
    for case in ("npu", "npu-off"):
        if case in runs:
            run = runs[case]
            wanted, other = ("batch_calls", "single_calls") if case == "npu" else ("single_calls", "batch_calls")
            if not run[wanted] or run[other] or run["unpinned_copies"] or run["left_open"]:
                found.append(f"{case}: {[(key, run[key]) for key in (wanted, other, 'unpinned_copies', 'left_open')]}")
    if "failing" in runs and not runs["failing"]["failed_loads"]:
        found.append("failing: no load failed")
    return found


def _differing(right: Sequence[tuple[Scored, Scored]], run: dict[str, Any]) -> dict[int, str]:
    """Place of an answer that equals no right one -> the difference."""
    found = {}
    for at, (answer, ways) in enumerate(zip(scored_answers(run), right, strict=True)):
        differences = [difference(one, answer) for one in ways]
        if None not in differences:
            found[at] = str(differences[0])
    return found
