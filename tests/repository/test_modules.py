"""Sizes of the packages' modules: none too long to hold one idea, none so short that it is a detour."""

from __future__ import annotations

import re

from lanes.rules import ROOT

from repository.tracked import tracked_files

LINES_MAX = 500
LINES_MIN = 25
# Shorter ones, each with the reason for which it is a module.
SHORT: dict[str, str] = {
    "connector/src/spillway_connector/device/cuda/gather.py": "the kernel: imported only where Triton is installed",
    "connector/src/spillway_connector/engine/connector.py": "a path that users' configurations of vLLM name",
    "connector/src/spillway_connector/engine/spec.py": "a path that users' configurations of vLLM name",
    "connector/src/spillway_connector/transfer_config.py": "what the engine service and the benches start engines with",
    "connector/src/spillway_connector/testing/cache_first.py": "loads as an engine's, for tests of three rooms",
    "connector/src/spillway_connector/testing/clock.py": "the stepped clock, for tests of every room",
    "connector/src/spillway_connector/tiers/disk/room.py": "the bound of both layouts, which do not import each other",
    "settings/src/spillway_settings/gateway_memory.py": "figures that the check and the gateway both read",
    "services/ctl/src/spillway_ctl/errors.py": "the error tree, imported by all modules of the package",
    "services/engine/src/spillway_engine/errors.py": "the error tree, imported by all modules of the package",
    "services/engine/src/spillway_engine/headless.py": "run as a program of its own, in place of the API server",
    "services/simulator/src/spillway_simulator/errors.py": "the error tree, imported by all modules of the package",
    "services/stack/src/spillway_stack/errors.py": "the error tree, imported by all modules of the package",
}
MODULES = tuple(path for path in tracked_files() if re.search(r"(^|/)src/.*\.py$", path))


def lines(path: str) -> int:
    return len((ROOT / path).read_text().splitlines())


def is_measured(path: str) -> bool:
    return not path.endswith(("/__init__.py", "/__main__.py"))


def test_no_module_is_too_long() -> None:
    assert {path: count for path in MODULES if (count := lines(path)) > LINES_MAX} == {}


def test_no_module_is_too_short() -> None:
    short = {path: count for path in MODULES if is_measured(path) and (count := lines(path)) < LINES_MIN}
    assert short.keys() - SHORT.keys() == set(), "merge it into its neighbour, or list it with the reason"
    assert SHORT.keys() - short.keys() == set(), "no longer short"


def test_the_packages_are_measured() -> None:
    packages = {path.split("/src/")[0] for path in MODULES}
    assert {"connector", "gateway", "services/engine"} <= packages
    assert len(MODULES) > 200
