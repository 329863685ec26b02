"""The lines of a Dockerfile that fail its build where BASE does not suit, run by a shell as a build would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from chart.helm_binaries import ROOT

FILES = [ROOT / "docker" / f"engine-{name}.Dockerfile" for name in ("ascend", "cuda")]
each = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def checks(file: Path) -> list[str]:
    """Commands of RUN instructions that only look: those that begin with `python3 -c`."""
    text = file.read_text().replace("\\\n", "")
    runs = [line.removeprefix("RUN ") for line in text.splitlines() if line.startswith("RUN ")]
    return [
        part.strip() for line in runs for part in re.split(r"\s&&\s", line) if part.strip().startswith("python3 -c")
    ]


def outcome(check: str, packages: Path, vllm: str = "0.23") -> tuple[int, str]:
    """Run the check in a shell whose `python3` finds these packages before its own."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(packages),
        "VLLM": vllm,
    }
    command = ["/bin/sh", "-c", check]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


def with_vllm(folder: Path, version: str) -> Path:
    metadata = folder / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder


@each
@pytest.mark.parametrize(
    ("found", "vllm"), [("0.23.0", "0.23"), ("0.23.0+empty", "0.23"), ("0.32.1rc1", "0.32"), ("0.31.0.dev7", "0.32")]
)
def test_a_base_of_the_vllm_that_the_tag_will_say_passes(file: Path, found: str, vllm: str, tmp_path: Path) -> None:
    """A build from vLLM's main branch says `dev` and some other number; the number does not tell whether it suits."""
    _, version = checks(file)
    assert outcome(version, with_vllm(tmp_path, found), vllm) == (0, "")


@each
@pytest.mark.parametrize(
    ("found", "vllm"), [("0.30.0", "0.23"), ("0.23.0", "0.30"), ("0.2.3", "0.23"), ("0.230.0", "0.23")]
)
def test_a_base_of_another_vllm_fails_the_build(file: Path, found: str, vllm: str, tmp_path: Path) -> None:
    _, version = checks(file)
    status, said = outcome(version, with_vllm(tmp_path, found), vllm)
    assert status == 1
    assert said == f"VLLM={vllm}: BASE has vLLM {found}; set VLLM to that, or another BASE\n"


@each
def test_a_base_without_vllm_fails_the_build(file: Path, tmp_path: Path) -> None:
    _, version = checks(file)
    status, said = outcome(version.replace("'vllm'", "'vllm-that-is-nowhere'"), tmp_path)
    assert status == 1 and "PackageNotFoundError" in said


@each
def test_everything_that_an_engine_imports_is_looked_at(file: Path, tmp_path: Path) -> None:
    """Packages that only encrypted blocks need count, too: an image without them would refuse such blocks first in a
    running pod."""
    imports, _ = checks(file)
    assert outcome(imports, tmp_path) == (0, "")
    for name in ("cryptography", "hiredis", "numpy", "spillway_engine"):
        folder = tmp_path / f"without-{name}"
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise ImportError(__name__)\n")
        status, said = outcome(imports, folder)
        assert status == 1 and said.endswith(f"ImportError: {name}\n")
