"""Distributions name the distributions that they import; images, the Makefile and pytest name all that they need."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from lanes.rules import ROOT

from repository.tracked import tracked_files

OWN = "spillway-"


@dataclass(frozen=True)
class Distribution:
    """folder: relative to the root. needed: other distributions of this repository; optional: those of its extras."""

    folder: str
    version: str
    needed: frozenset[str]
    optional: frozenset[str]


def own(requirements: list[str]) -> frozenset[str]:
    names = {re.split(r"[^\w-]", requirement, maxsplit=1)[0] for requirement in requirements}
    return frozenset(name for name in names if name.startswith(OWN))


def distributions() -> dict[str, Distribution]:
    """The distributions by name."""
    found = {}
    for path in tracked_files():
        if path.endswith("/pyproject.toml"):
            project = tomllib.loads((ROOT / path).read_text())["project"]
            extras = [item for items in project.get("optional-dependencies", {}).values() for item in items]
            folder = path.removesuffix("/pyproject.toml")
            found[project["name"]] = Distribution(
                folder, project["version"], own(project["dependencies"]), own(extras) - {project["name"]}
            )
    return found


ALL = distributions()
MAKEFILE = (ROOT / "Makefile").read_text()


def imported(source: str) -> set[str]:
    """Distributions of this repository that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
    tops = {name.partition(".")[0].replace("_", "-") for name in names}
    return {name for name in tops if name.startswith(OWN)}


def closed(names: set[str], among: Mapping[str, Distribution]) -> set[str]:
    """Return these distributions and all that they need."""
    while (more := names.union(*(among[name].needed for name in names))) != names:
        names = more
    return names


def installed_together(dockerfile: str) -> Iterator[set[str]]:
    """Folders of each `pip wheel` of a Dockerfile."""
    for line in dockerfile.replace("\\\n", " ").splitlines():
        for command in line.split("&&"):
            if "pip wheel" in command:
                yield set(re.findall(r"\./(\S+)", command))


@pytest.mark.parametrize("name", ALL)
def test_what_a_distribution_imports_is_what_it_declares(name: str) -> None:
    folder = f"{ALL[name].folder}/src/"
    sources = [
        (ROOT / path).read_text() for path in tracked_files() if path.startswith(folder) and path.endswith(".py")
    ]
    found = set().union(*map(imported, sources)) - {name}

    assert found - ALL[name].optional == ALL[name].needed - ALL[name].optional
    assert ALL[name].optional <= found | ALL[name].needed


def test_the_settings_import_nothing_of_ours_and_the_gateway_them_alone() -> None:
    """The gateway's image has neither numpy nor PyTorch."""
    assert ALL["spillway-settings"].needed == frozenset()
    assert closed({"spillway-gateway"}, ALL) == {"spillway-gateway", "spillway-settings"}


def test_images_hold_what_their_distributions_need() -> None:
    folders = {distribution.folder: name for name, distribution in ALL.items()}
    counted = 0
    for file in sorted((ROOT / "docker").glob("*.Dockerfile")):
        for built in installed_together(file.read_text()):
            names = {folders[folder] for folder in built}
            if names == {"spillway-stack"}:
                continue  # a stage that prepares the model with one module of it, and is thrown away
            assert closed(names, ALL) == names, file.name
            assert all(f"\nCOPY {folder} {folder}\n" in file.read_text() for folder in built), file.name
            counted += 1
    assert counted == 5


def test_the_makefile_installs_all_and_has_their_version() -> None:
    listed = re.findall(r"^DISTRIBUTIONS := (.*)$", MAKEFILE, re.M)[0].split()
    [version] = re.findall(r"^VERSION := (.*)$", MAKEFILE, re.M)

    assert sorted(listed) == sorted(distribution.folder for distribution in ALL.values())
    assert {distribution.version for distribution in ALL.values()} == {version}


def test_the_makefile_installs_whole_engines_of_another_vllm() -> None:
    [listed] = re.findall(r"^ENGINE_DISTRIBUTIONS := (.*)$", MAKEFILE, re.M)
    names = {name for name, distribution in ALL.items() if distribution.folder in listed.split()}

    assert closed(names, ALL) == names and "spillway-engine" in names


def test_the_makefile_lends_another_interpreter_all_that_the_connector_needs() -> None:
    [path] = re.findall(r"^CONNECTOR := (.*)$", MAKEFILE, re.M)
    # The engine service has what compares answers (near_ties.py).
    needed = closed({"spillway-connector"}, ALL) | {"spillway-engine"}

    assert set(path.split(":")) == {f"{ALL[name].folder}/src" for name in needed}
    assert "PYTHONPATH=connector" not in MAKEFILE


def test_pytest_and_ruff_know_all() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]

    assert {f"{one.folder}/tests" for one in ALL.values()} <= set(tools["pytest"]["ini_options"]["testpaths"])
    assert {name.replace("-", "_") for name in ALL} == set(tools["ruff"]["lint"]["isort"]["known-first-party"])


def test_the_checks_find_what_is_wrong() -> None:
    assert imported(
        "def later():\n    import spillway_a.b\nfrom spillway_c import d\nfrom . import e\nimport json"
    ) == {
        "spillway-a",
        "spillway-c",
    }
    a = Distribution("a", "1", frozenset({"spillway-b"}), frozenset())
    b = Distribution("b", "1", frozenset({"spillway-c"}), frozenset())
    c = Distribution("c", "1", frozenset(), frozenset())
    among = {"spillway-a": a, "spillway-b": b, "spillway-c": c}
    assert closed({"spillway-a"}, among) == {"spillway-a", "spillway-b", "spillway-c"}
    assert list(installed_together("RUN pip install x \\\n  && pip wheel --no-deps ./a ./services/b\n")) == [
        {"a", "services/b"}
    ]


def test_every_distribution_has_its_package_and_tests() -> None:
    for name, distribution in ALL.items():
        assert Path(ROOT, distribution.folder, "src", name.replace("-", "_"), "__init__.py").is_file()
        assert Path(ROOT, distribution.folder, "tests").is_dir()


def test_no_two_packages_of_the_environment_bring_the_same_module() -> None:
    """The one installed last would replace the other's, as xds-protos does with OpenTelemetry's messages."""
    owners: dict[str, set[str]] = {}
    for distribution in metadata.distributions():
        name = distribution.name  # read from a file each time
        for line in (distribution.read_text("RECORD") or "").splitlines():
            path = line.split(",", 1)[0]
            if path.endswith(".py"):
                owners.setdefault(path, set()).add(name)
    assert len(owners) > 1000
    assert {path: names for path, names in owners.items() if len(names) > 1} == {}
