"""The transport's probe in a process of its own, and its lines as flat keys."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence

PROBE_SECONDS = 900.0
_LINE = re.compile(r"^(PASS|FAIL|INFO)  ([^:]+): (.*)$", re.MULTILINE)
_PIECES = re.compile(r"^rate (\w+), (\w+), \d+ x (\d+) KiB$")
_WHOLE = re.compile(r"^rate (\w+), (\w+)$")
_GIGABYTES = re.compile(r"(loop|batch|contiguous) ([\d.]+) GB/s")


def run_probe(library: str | None, device: int, megabytes: int) -> str:
    """Return the output of the probe, whatever its verdict. A probe that hangs adds a failed line."""
    command = [sys.executable, "-m", "spillway_connector.device.npu_probe"]
    command += ["--device", str(device), "--megabytes", str(megabytes)]
    command += ["--library", library] if library is not None else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired as late:
        printed = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else ""
        return f"{printed}\nFAIL  end: the probe took longer than {PROBE_SECONDS:.0f} s\n"
    if done.returncode not in (0, 1):
        return f"{done.stdout}\nFAIL  end: the probe ended with status {done.returncode}: {done.stderr[-1000:]!r}\n"
    return done.stdout


def probe_figures(printed: str) -> dict[str, str | float | bool | Sequence[str]]:
    """Every verdict by the name of its line, the lines that failed, and the rates in GB/s."""
    report: dict[str, str | float | bool | Sequence[str]] = {"emulator": printed.startswith("EMULATOR")}
    failed = []
    for verdict, name, detail in _LINE.findall(printed):
        if (rate := _PIECES.match(name)) is not None:
            key = f"probe_{rate[1]}_{rate[2]}_{rate[3]}_kib"
        elif (rate := _WHOLE.match(name)) is not None:
            key = f"probe_{rate[1]}_{rate[2]}"
        else:
            key = f"probe_{name.replace(' ', '_')}"
            if verdict != "INFO":
                report[f"{key}_verdict"] = verdict
            report[key] = detail
            if verdict == "FAIL":
                failed.append(f"{name}: {detail}")
            continue
        for path, value in _GIGABYTES.findall(detail):
            report[f"{key}_{path}_gb_per_second"] = float(value)
    report["probe_failed"] = failed
    return report
