"""Groups of engines as the chart renders them: its arithmetic is read, not repeated."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spillway_ctl.errors import CommandError
from spillway_settings.shared_names import CUSTOM_KINDS

HELM_SECONDS = 60.0
_TEMPLATE = "templates/engine-configmap.yaml"


@dataclass(frozen=True, slots=True)
class PlannedEngines:
    """name: the StatefulSet's name. memory: the chart's figures for one pod. settings: the settings that its pods will
    read."""

    name: str
    model: str
    memory: dict[str, Any]
    settings: dict[str, Any]

    @property
    def shared_tier(self) -> str:
        offload = self.settings["offload"]
        return str(offload.get("sharedTier", {}).get("type", "none")) if offload["enabled"] else "none"

    @property
    def tier_below(self) -> str:
        """The type of the tier below the shared tier."""
        below = self.settings["offload"].get("sharedTier", {}).get("below", {})
        return str(below.get("type", "none")) if self.shared_tier != "none" else "none"

    @property
    def prefill_tokens_per_second(self) -> float | None:
        rate = self.settings["offload"].get("prefillTokensPerSecond")
        return float(rate) if rate else None


def render_chart(helm: str, chart: Path, values: Sequence[Path], sets: Sequence[str]) -> str:
    """`helm template` of the engines' ConfigMaps. Raises CommandError with Helm's words."""
    command = [helm, "template", "plan", str(chart), "--show-only", _TEMPLATE]
    # Planning asks no cluster, so the chart may make what a cluster has only if somebody installed it.
    command += [word for kind in CUSTOM_KINDS for word in ("-a", kind)]
    command += [word for file in values for word in ("-f", str(file))]
    command += [word for setting in sets for word in ("--set", setting)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=HELM_SECONDS, check=False)
    except FileNotFoundError as error:
        raise CommandError(
            f"--helm {helm}: no such program; give Helm's path, or --rendered with the output of helm template"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(
            f"helm template took more than {HELM_SECONDS:g} s; run it yourself and give its output with --rendered"
        ) from error
    if done.returncode != 0:
        raise CommandError(f"helm template refused these values, correct them: {done.stderr.strip()}")
    return done.stdout


def read_rendered(text: str) -> tuple[PlannedEngines, ...]:
    """Every engine ConfigMap in what helm template prints. Raises CommandError."""
    try:
        found = tuple(_engines(yaml.safe_load_all(text)))
    except (yaml.YAMLError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"what was rendered cannot be read ({error}); give the output of helm template") from error
    if not found:
        raise CommandError("no engine is in what was rendered; give the output of helm template of charts/spillway")
    return found


def _engines(documents: Iterable[Any]) -> Iterable[PlannedEngines]:
    for document in documents:
        data = document.get("data", {}) if isinstance(document, dict) and document.get("kind") == "ConfigMap" else {}
        if "engine.yaml" in data and "memory.json" in data:
            settings = yaml.safe_load(data["engine.yaml"])
            name = str(document["metadata"]["name"])
            yield PlannedEngines(name, str(settings["model"]["servedName"]), json.loads(data["memory.json"]), settings)
