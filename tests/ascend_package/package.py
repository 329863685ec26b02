"""vllm-ascend's source archive, and one run of checks in a process that has its package beside vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from upstream.archives import Archive, unpacked

ARCHIVE = Archive(
    "0.23.0.post1",
    "a3b9f4a5dd7aa50c37e03d1f35937c4ae5aeacc49b734cac74d59ce5757738e1",
    "vllm-ascend",
    ("vllm_ascend/", "vllm_ascend.egg-info/", "setup.py", "tests/__init__.py", "tests/ut/"),
)
RUN_SECONDS_MAX = 600.0
TESTS = Path(__file__).resolve().parents[1]


class Outcome(NamedTuple):
    passed: tuple[str, ...]
    not_passed: tuple[str, ...]  # names, with the reason


def run(cases: Sequence[str], options: Sequence[str], folder: Path, scratch: Path) -> Outcome:
    """pytest on these files, in a process that imports vllm_ascend from its archive.

    Raises RuntimeError with the end of the output where the run itself fails, and subprocess.TimeoutExpired.
    """
    report = scratch / "report.xml"
    command = [sys.executable, "-m", "pytest", "--rootdir", str(folder), "-c", os.devnull, "--quiet", "--tb=short"]
    command += ["--confcutdir", str(folder), "-p", "no:cacheprovider", "-W", "ignore", f"--junitxml={report}"]
    command += [*options, *cases]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "PYTHONPATH": os.pathsep.join([str(unpacked(ARCHIVE)), str(TESTS)]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS_MAX, check=False
    )
    if done.returncode not in (0, 1) or not report.exists():
        raise RuntimeError(f"the checks could not be run:\n{(done.stdout + done.stderr)[-4000:]}")
    passed, not_passed = [], []
    for case in ET.parse(report).getroot().iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if bad is None:
            passed.append(str(case.get("name")))
        else:
            not_passed.append(f"{case.get('classname')}.{case.get('name')}: {bad.tag}: {(bad.text or '')[-1500:]}")
    return Outcome(tuple(passed), tuple(not_passed))
