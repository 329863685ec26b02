"""Python interpreters of engines, by their vLLM: one of them is installed here, each other one in a folder beside."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

VLLM_HERE = "0.23"  # requirements/local.in
VLLM_VERSIONS = (VLLM_HERE, "0.30", "0.32")  # requirements/vllm-*.in


def interpreter(vllm: str) -> Path:
    """Return the Python that runs this process for VLLM_HERE; else that of .venv/vllm-<vllm>, which need not exist."""
    if vllm == VLLM_HERE:
        return Path(sys.executable)
    return Path(sys.prefix).parent / f"vllm-{vllm}" / "bin" / "python"


def environment_problems(versions: Iterable[str]) -> list[str]:
    """Return one line for each missing environment; empty if engines of these versions can start."""
    return [
        f"VLLM={vllm} needs an environment of its own, and {interpreter(vllm)} does not exist; "
        f"run make install VLLM={vllm}"
        for vllm in dict.fromkeys(versions)
        if not interpreter(vllm).exists()
    ]
