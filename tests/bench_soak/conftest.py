"""The soak's own parts without an engine: its schedule, its judgement, its faults on a real Valkey and real files."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
