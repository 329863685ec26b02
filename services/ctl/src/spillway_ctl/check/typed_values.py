"""The given values, laid over the defaults and typed; groups of engines; fields that a cluster has not. Pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from spillway_ctl.check.chart_facts import Cluster, facts
from spillway_ctl.check.finding import Finding
from spillway_settings.values.engine import Engine
from spillway_settings.values.release import Values
from spillway_settings.values.schema import needed_settings

_DEFAULTS: dict[str, Any] = msgspec.to_builtins(Values())
# Maps whose keys are an operator's own: a null among them removes a key.
_OPEN = {"labels", "annotations", "nodeselector", "extraenv", "extraresources", "extraconfig"}


def laid_out(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values over the defaults, without keys that begin with `x-`. A default that null removes is None."""
    return _overlaid(copy.deepcopy(_DEFAULTS), _with_whole_numbers(_without_own_keys(given)))


def whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as templates see them, with every default: a setting that is not among them was removed by null."""
    return _completed(_with_whole_numbers(values), Values())


def typed(tree: Mapping[str, Any]) -> Values:
    """The tree of laid_out, which the schema takes."""
    return msgspec.convert({key: value for key, value in tree.items() if key != "global"}, Values)


def engine_groups(tree: Mapping[str, Any]) -> dict[str, Engine]:
    """Key in `engines` -> its settings over those of `engine`; the key of `engine` alone is empty."""
    groups = {}
    for key in sorted(tree["engines"]):
        over = _without_nulls_of_maps(tree["engines"][key] or {}, tree["engine"])
        base = copy.deepcopy(tree["engine"])
        sizes = over.get("offload") or {}
        # An entry that names one of the two ways to size the CPU tier replaces the other.
        if "cpuBytes" in sizes and "numCpuBlocks" not in sizes:
            base["offload"]["numCpuBlocks"] = None
        if "numCpuBlocks" in sizes and "cpuBytes" not in sizes:
            base["offload"]["cpuBytes"] = None
        groups[key] = msgspec.convert(_overlaid(base, over), Engine)
    return groups or {"": msgspec.convert(tree["engine"], Engine)}


def global_settings(given: Mapping[str, Any], cluster: Cluster) -> Iterator[Finding]:
    """Values below `global`, which a parent chart may have for its other parts."""
    for key in (given.get("global") or {}) if cluster.is_root else ():
        yield Finding(
            f"global.{key}",
            "no setting of this chart is below global; image.registry and image.pullSecrets hold for all of its images",
            "remove it",
        )


def missing_defaults(tree: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each value that null removed without a replacement, if the schema allows null."""
    for path, keys in needed_settings().items():
        section: Any = tree
        for step in filter(None, path.split(".")):
            section = section.get(step) if isinstance(section, dict) else None
        for key in keys if isinstance(section, dict) else ():
            if section.get(key) is None:
                at = f"{path}.{key}" if path else key
                yield Finding(at, "null given, but nothing stands in for its default", "remove the line")


def too_new(tree: Mapping[str, Any], cluster: Cluster) -> Iterator[Finding]:
    """Fields of Kubernetes that the cluster's version does not have."""
    since = facts("kubernetes-since.yaml")
    fields = [(re.compile(f"{form}$"), version) for form, version in since["fields"].items()]
    sections = {name: tree[name] for name in ("engine", "gateway", "redis")}
    sections |= {f"engines.{key}": entry or {} for key, entry in tree["engines"].items()}
    for name, section in sections.items():
        for key in since["settings"]:
            for path, value in _leaves(section.get(key), f"{name}.{key}"):
                for form, version in fields:
                    if value is not None and form.search(path) and cluster.is_before(version):
                        yield Finding(
                            path,
                            f"given, but Kubernetes {cluster.version} does not have it, which came with {version}",
                            "remove it, or bring the cluster to that version (spillway check: --kube-version)",
                        )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _leaves(entry, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield f"{path}.{key}", entry
            yield from _leaves(entry, f"{path}.{key}")


def _without_nulls_of_maps(over: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """A null over a map of Kubernetes empties it."""
    return {key: {} if value is None and isinstance(base.get(key), dict) else value for key, value in over.items()}


def _without_own_keys(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_own_keys(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    return {key: _without_own_keys(inner) for key, inner in value.items() if not str(key).startswith("x-")}


def _with_whole_numbers(value: Any) -> Any:
    """2.0 and 1e1 are whole numbers in a schema, and are rendered as such."""
    if isinstance(value, list):
        return [_with_whole_numbers(entry) for entry in value]
    if isinstance(value, Mapping):
        return {key: _with_whole_numbers(inner) for key, inner in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _overlaid(base: dict[str, Any], over: Mapping[str, Any], is_open: bool = False) -> dict[str, Any]:
    for key, value in over.items():
        opens = is_open or key.lower().endswith(tuple(_OPEN))
        if value is None and opens and is_open:
            base.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _overlaid(base[key], value, opens)
        else:
            base[key] = copy.deepcopy(value)
    return base


def _completed(given: Mapping[str, Any], defaults: msgspec.Struct) -> dict[str, Any]:
    found = dict(given)
    for field in msgspec.structs.fields(defaults):
        key, default = field.encode_name, getattr(defaults, field.name)
        if key not in found:
            found[key] = None
        elif isinstance(default, msgspec.Struct) and isinstance(found[key], Mapping):
            found[key] = _completed(found[key], default)
    return found
