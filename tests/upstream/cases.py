"""The lists of vLLM's tests, and one run of those that apply."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from upstream.archives import ARCHIVES, Archive, unpacked
from upstream.hub import offline_hub
from upstream.substitution import TABLE_ENV

RUN_SECONDS_MAX = 1500.0
_FOLDER = Path(__file__).parent
_TESTS = _FOLDER.parent
_ROOT = Path("tests/v1")
_FOLDERS = ("kv_offload", "kv_connector/unit")


class Cases(NamedTuple):
    """Test files of one archive, by what becomes of them; keys are paths below `tests/v1`, or patterns of them."""

    name: str  # of the list, and of the module with its substitutes
    archive: Archive
    run: Mapping[str, Mapping[str, str]]  # by file: the cases left out, by name, with the reason
    needs_gpu: Mapping[str, str]
    other_class: Mapping[str, str]

    @property
    def not_run(self) -> Mapping[str, str]:
        return {**self.needs_gpu, **self.other_class}


class Outcome(NamedTuple):
    """The outcome of the cases of one file."""

    passed: int
    not_passed: tuple[str, ...]  # names, with the reason of those that were skipped


def cases_of(version: str) -> Cases | None:
    """The list for this release; None if there is none."""
    for path in sorted(_FOLDER.glob("cases_*.toml")):
        document = tomllib.loads(path.read_text())
        if document["version"] == version:
            run = {file: entry.get("without", {}) for file, entry in document["run"].items()}
            return Cases(
                path.stem.removeprefix("cases_"),
                ARCHIVES[version],
                run,
                document["needs_gpu"],
                document["other_class"],
            )
    return None


def files_in(archive: Archive) -> list[str]:
    """Every test file of offloading in the archive."""
    root = unpacked(archive) / _ROOT
    found = [path for folder in _FOLDERS for path in (root / folder).rglob("test_*.py")]
    return sorted(path.relative_to(root).as_posix() for path in found)


def unlisted(cases: Cases, files: list[str]) -> list[str]:
    """Files that the list does not mention."""
    patterns = [*cases.run, *cases.not_run]
    return [file for file in files if not any(fnmatch(file, pattern) for pattern in patterns)]


def stale(cases: Cases, files: list[str]) -> list[str]:
    """Entries of the list that name no file, or a case that its file does not have."""
    entries = [pattern for pattern in [*cases.run, *cases.not_run] if not any(fnmatch(file, pattern) for file in files)]
    root = unpacked(cases.archive) / _ROOT
    for file, without in cases.run.items():
        text = (root / file).read_text() if (root / file).exists() else ""
        entries += [
            f"{file}: {case}" for case in without if f"def {case.rpartition('::')[2].partition('[')[0]}(" not in text
        ]
    return entries


def run(cases: Cases, scratch: Path) -> dict[str, Outcome]:
    """Run what applies with Spillway's classes, in one process of this interpreter. By file.

    Raises RuntimeError with the end of the output where the run itself fails, and subprocess.TimeoutExpired.
    """
    root = unpacked(cases.archive)
    report = scratch / "report.xml"
    left_out = [f"{_ROOT / file}" + "::" + case for file, without in cases.run.items() for case in without]
    command = [
        *(sys.executable, "-m", "pytest", "--rootdir", str(root), "-c", os.devnull),
        *("--confcutdir", str(root / _ROOT), "-p", "no:cacheprovider", "-p", "upstream.substitution"),
        *(
            "--quiet",
            "--tb=short",
            "-W",
            "ignore",
            "--timeout=600",
            f"--junitxml={report}",
            "-o",
            "junit_family=xunit1",
        ),
        *(option for name in left_out for option in ("--deselect", name)),
        *(str(_ROOT / file) for file in cases.run),
    ]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        **offline_hub(scratch / "hub"),
        "PYTHONPATH": os.pathsep.join([str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        TABLE_ENV: f"substitutes_{cases.name}",
    }
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS_MAX, check=False
    )
    (scratch / "output.txt").write_text(done.stdout + done.stderr)
    if done.returncode not in (0, 1) or not report.exists():
        raise RuntimeError(f"vLLM's tests could not be run:\n{(done.stdout + done.stderr)[-4000:]}")
    return _outcomes(report)


def _outcomes(report: Path) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        file = Path(case.get("file") or "").relative_to(_ROOT).as_posix()
        passed, not_passed = outcomes.get(file, Outcome(0, ()))
        if (bad := next((child for child in case if child.tag in ("failure", "error", "skipped")), None)) is None:
            outcomes[file] = Outcome(passed + 1, not_passed)
        else:
            why = f"{case.get('name')}: {bad.tag}: {bad.get('message', '')[:300]}"
            outcomes[file] = Outcome(passed, (*not_passed, why))
    return outcomes
