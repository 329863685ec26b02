"""An Ascend node's driver, and CANN and torch_npu of the image, against what its vllm-ascend needs.

Sources of the numbers: the requirements of vllm-ascend's own distribution (torch_npu), its installation guide (CANN)
and the table "CANN and Ascend HDK Version Compatibility" of CANN's release notes, 8.5 to 9.1 (driver).
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DRIVER_FILE = Path("/usr/local/Ascend/driver/version.info")
# Places in which CANN may be, without ASCEND_HOME_PATH of its set_env.sh; then the files there that name its version.
CANN_HOMES = (Path("/usr/local/Ascend/ascend-toolkit/latest"), Path("/usr/local/Ascend/cann"))
CANN_FILES = (
    "*-linux/ascend_toolkit_install.info",
    "ascend_toolkit_install.info",
    "share/info/runtime/version.info",
    "runtime/version.info",
)
# Major and minor version of vllm-ascend -> of CANN.
CANN_OF_VLLM_ASCEND = {(0, 23): (9, 1)}
# Major and minor version of CANN -> the oldest driver that it runs on.
DRIVER_OF_CANN = {(8, 5): (25, 0), (9, 0): (25, 0), (9, 1): (25, 2)}
_VERSION_LINE = re.compile(r"^\s*(?:package_)?version\s*=\s*\"?([0-9][\w.+-]*)", re.IGNORECASE | re.MULTILINE)
_TORCH_NPU = re.compile(r"^torch[-_]npu\s*==\s*([\w.+]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class AscendVersions:
    """The versions as their own files have them; None: not found."""

    vllm_ascend: str | None
    driver: str | None
    cann: str | None
    torch_npu: str | None
    torch_npu_needed: str | None  # by vllm-ascend


def read_ascend_versions(
    environment: Mapping[str, str], driver_file: Path = DRIVER_FILE, cann_homes: tuple[Path, ...] = CANN_HOMES
) -> AscendVersions:
    """Reads small files and the distributions' metadata; imports neither torch_npu nor vllm_ascend."""
    given = environment.get("ASCEND_HOME_PATH")
    homes = (Path(given), *cann_homes) if given else cann_homes
    files = (file for home in homes for pattern in CANN_FILES for file in sorted(home.glob(pattern)))
    needs = _requirements("vllm-ascend")
    return AscendVersions(
        vllm_ascend=_installed("vllm-ascend"),
        driver=_version_in(driver_file),
        cann=next((version for file in files if (version := _version_in(file)) is not None), None),
        torch_npu=_installed("torch-npu"),
        torch_npu_needed=next((match[1] for need in needs if (match := _TORCH_NPU.match(need))), None),
    )


def version_problem(found: AscendVersions) -> str | None:
    """One sentence with what is needed, what was found and the remedies; None if nothing contradicts.

    Without vllm-ascend nothing is needed. What was not found contradicts nothing, but the driver: CANN looks for its
    version.info too.
    """
    if found.vllm_ascend is None:
        return None
    cann_needed = CANN_OF_VLLM_ASCEND.get(_pair(found.vllm_ascend) or (0, 0))
    cann = _pair(found.cann)
    driver_needed = DRIVER_OF_CANN.get(cann or cann_needed or (0, 0))
    driver = _pair(found.driver)
    remedies = []
    if found.driver is None:
        remedies.append(
            f"bring {DRIVER_FILE} into the container (engine.accelerator.driverMounts, or ascend-docker-runtime)"
        )
    elif driver is not None and driver_needed is not None and driver < driver_needed:
        remedies.append("upgrade the node's driver, or choose other nodes by engine.nodeSelector")
    if cann is not None and cann_needed is not None and cann != cann_needed:
        remedies.append("use an image with that CANN, without another one mounted over it")
    if None not in (found.torch_npu, found.torch_npu_needed) and _public(found.torch_npu) != found.torch_npu_needed:
        remedies.append("use an image with that torch_npu")
    if not remedies:
        return None
    needed = [
        f"driver {_text(driver_needed)} or newer" if driver_needed else "a driver",
        *([f"CANN {_text(cann_needed)}"] if cann_needed else []),
        *([f"torch_npu {found.torch_npu_needed}"] if found.torch_npu_needed else []),
    ]
    present = [
        f"{name} {version or 'not found'}"
        for name, version in (("driver", found.driver), ("CANN", found.cann), ("torch_npu", found.torch_npu))
    ]
    return (
        f"vllm-ascend {found.vllm_ascend} needs {', '.join(needed)}, and here are {', '.join(present)}; "
        f"{'; '.join(remedies)}"
    )


def _version_in(file: Path) -> str | None:
    try:
        match = _VERSION_LINE.search(file.read_text(errors="replace"))
    except OSError:
        return None
    return match[1] if match else None


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _pair(version: str | None) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None


def _public(version: str | None) -> str:
    """Return the version without what a local build adds after +."""
    return (version or "").partition("+")[0]


def _text(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"
