"""Marks tests by their rule, chooses lanes, and fails a test that needs more than its rule names."""

from __future__ import annotations

import importlib.abc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .environments import vllm_here
from .rules import (
    NEEDS,
    NOTHING,
    WITHOUT_ENGINE,
    Lane,
    NoRule,
    holds_other_vllm,
    lane_of,
    lanes_below,
    needs_of,
    needs_of_command,
    other_vllm_of,
)

# A test that may use everything has one of these needs.
UNBOUNDED = frozenset({"engine", "engines", "other_vllm", "cluster", "chromium"})


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lanes", "lanes of tests, by what they need (tests/lanes/rules.py)")
    group.addoption("--lanes", type=_lanes, metavar="LANE,...", help=f"only these of {', '.join(Lane)}")
    group.addoption("--lanes-report", type=Path, metavar="FILE", help="write counts and durations as JSON")


def _lanes(text: str) -> frozenset[Lane]:
    return frozenset(Lane(word) for word in text.split(","))


def pytest_configure(config: pytest.Config) -> None:
    for name, (lane, meaning) in NEEDS.items():
        config.addinivalue_line("markers", f"{name}: {meaning} (lane {lane})")
    chosen = config.getoption("lanes")
    # Outside of tests only what no test of this run may use is refused.
    outside = None if chosen is None else frozenset(need for need, (lane, _) in NEEDS.items() if lane in chosen)
    config.pluginmanager.register(_Chosen(chosen), "lanes-chosen")
    if vllm_here() in WITHOUT_ENGINE:
        os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # else vLLM takes its platform from its build
    _guard.allowed = None if outside and outside & UNBOUNDED else outside
    if _guard not in sys.meta_path:
        sys.meta_path.insert(0, _guard)
        sys.addaudithook(_guard.audit)


class _Chosen:
    def __init__(self, lanes: frozenset[Lane] | None) -> None:
        self._lanes = lanes

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Files of other lanes are not even imported."""
        if self._lanes is None:
            return None
        try:
            if Lane.OTHER_VLLM in self._lanes:  # this interpreter is of such an environment
                return None if self._runs_on_other(collection_path, vllm_here()) else True
            if collection_path.is_dir():
                here = lanes_below(collection_path)
            elif collection_path.name.startswith("test_") and collection_path.suffix == ".py":
                here = {lane_of(needs_of(collection_path))}
            else:
                return None
        except (NoRule, ValueError):  # reported at collection; or outside of the repository
            return None
        return None if here & self._lanes else True

    @staticmethod
    def _runs_on_other(path: Path, vllm: str) -> bool:
        if path.is_dir():
            return holds_other_vllm(path, vllm)
        return vllm in other_vllm_of(path) or not path.name.startswith("test_")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    if not isinstance(collector, pytest.Module):
        return (yield)
    try:
        needs = needs_of(collector.path)
    except NoRule as missing:
        report = yield
        report.outcome, report.longrepr, report.result = "failed", str(missing), []
        return report
    with _guard.allowing(needs, collector.nodeid):
        return (yield)


def pytest_itemcollected(item: pytest.Item) -> None:
    for need in needs_of(item.path) or (NOTHING,):
        item.add_marker(need)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with _guard.allowing(needs_of(item.path), item.nodeid):
        return (yield)


class _Guard(importlib.abc.MetaPathFinder):
    """Fails a test at the import or the start of a process that its rule does not name.

    A module that another test of this process has imported is not imported again; the lane `unit`, whose process never
    imports vLLM, sees them all.
    """

    def __init__(self) -> None:
        self.allowed: frozenset[str] | None = None  # None: anything
        self._subject = "this run"

    @contextmanager
    def allowing(self, needs: frozenset[str], subject: str) -> Iterator[None]:
        before = self.allowed, self._subject
        # A test with an engine may use everything below it.
        self.allowed, self._subject = (None if needs & UNBOUNDED else needs), subject
        try:
            yield
        finally:
            self.allowed, self._subject = before

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "vllm":
            self._require("vllm", "imports vLLM")

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and self.allowed is not None:
            command: str | bytes | Sequence[Any] = arguments[1]
            words = [command] if isinstance(command, (str, bytes, os.PathLike)) else command
            for need in needs_of_command([os.fsdecode(word) for word in words]):
                self._require(need, f"starts {words}")

    def _require(self, need: str, action: str) -> None:
        if self.allowed is not None and need not in self.allowed:
            pytest.fail(f"{self._subject} {action}, and its rule in tests/lanes/rules.py does not name `{need}`", False)


_guard = _Guard()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    target: Path | None = config.getoption("lanes_report")
    if target is None:
        return
    seconds: dict[str, float] = {}
    counts: dict[str, int] = {}
    broken: list[str] = []
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
            if outcome and outcome != "deselected" and getattr(report, "count_towards_summary", True):
                counts[outcome] = counts.get(outcome, 0) + 1
                if outcome in ("failed", "error"):
                    broken.append(report.nodeid)
    target.write_text(json.dumps({"counts": counts, "seconds": seconds, "broken": broken}))
