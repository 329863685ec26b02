"""Files that newcomers open first: the licence that every label names, and hooks with the checks of `make check`."""

from __future__ import annotations

import re
import tomllib

import yaml
from lanes.rules import ROOT

from repository.tracked import tracked_files

LICENCE = "Apache-2.0"


def test_the_licence_is_the_one_that_packages_images_and_chart_name() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    projects = [path for path in tracked_files() if path.endswith("/pyproject.toml")]
    assert len(projects) == 7
    assert {tomllib.loads((ROOT / path).read_text())["project"]["license"] for path in projects} == {LICENCE}
    dockerfiles = [path for path in tracked_files() if re.fullmatch(r"docker/[\w-]+\.Dockerfile", path)]
    assert len(dockerfiles) >= 5
    for path in dockerfiles:
        assert re.findall(r'image\.licenses="([^"]*)"', (ROOT / path).read_text()) == [LICENCE], path
    chart = yaml.safe_load((ROOT / "charts/spillway/Chart.yaml").read_text())
    assert chart["annotations"]["artifacthub.io/license"] == LICENCE


def commands_of_make_check() -> list[str]:
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.split("\ncheck:", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    folders = re.findall(r"^DISTRIBUTIONS := (.*)$", makefile, re.MULTILINE)[0].split()
    sources = " ".join(f"{folder}/src" for folder in folders)
    lines = [line.strip().removeprefix("@").replace("$(BIN)", ".venv/local/bin") for line in recipe]
    return [line.replace("$(DISTRIBUTIONS:%=%/src)", sources).removesuffix(" .") for line in lines]


def test_the_hooks_of_a_commit_are_the_checks_of_make_check() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local", "a hook of another repository would be downloaded at a commit"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    assert [hook["entry"] for hook in repository["hooks"]] == commands_of_make_check()
