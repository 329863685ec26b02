"""A repository of a few files, for tests of the plugin over whole runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .rules import ROOT

INI = "[pytest]\npythonpath = tests\naddopts = --import-mode=importlib --strict-markers\n"


def run_in_repository(
    root: Path,
    rules: dict[str, tuple[str, ...]],
    files: dict[str, str],
    *arguments: str,
    other_vllm: dict[str, tuple[str, ...]] | None = None,
) -> subprocess.CompletedProcess[str]:
    """pytest on a repository of these files, with the plugin, these rules, and a vLLM that is an empty module."""
    for name, source in {**files, "tests/vllm.py": "", "pytest.ini": INI}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    (root / "conftest.py").write_text(
        f"import sys\nfrom pathlib import Path\nsys.path.append({str(ROOT / 'tests')!r})\nfrom lanes import rules\n"
        f"rules.ROOT, rules.RULES, rules.OTHER_VLLM = Path({str(root)!r}), {rules!r}, {other_vllm or {}!r}\n"
        "pytest_plugins = ['lanes.plugin']\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "tests"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=120)
