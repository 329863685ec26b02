"""A namespace document in words: whose KV it is and how it lies there. Pure.

The document is what the connector's engine/namespace/fields.py writes; other versions may hold more or less, so what is
missing is left out, and a document of another kind is shown as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spillway_ctl.quantities import plural

_DIGITS_SHOWN = 12
_RAW_CHARACTERS = 100


def describe(facts: Mapping[str, Any]) -> dict[str, str]:
    """Label -> text, in display order: model, layout, versions, parallel, hash, codec; what is absent is left out."""
    words = {
        "model": _model(facts),
        "layout": _layout(facts),
        "versions": _versions(facts.get("versions")),
        "parallel": _parallel(facts.get("parallel")),
        "hash": _hash(facts),
        "codec": _codec(facts.get("codec")),
    }
    found = {label: text for label, text in words.items() if text}
    if not found.keys() & {"model", "layout"}:
        raw = json.dumps(dict(facts), sort_keys=True)
        found["document"] = raw if len(raw) <= _RAW_CHARACTERS else raw[: _RAW_CHARACTERS - 3] + "..."
    return found


def _model(facts: Mapping[str, Any]) -> str:
    weights = str(facts.get("weights", ""))
    kind, _, rest = weights.partition(":")
    if kind in ("weights", "sampled"):
        weights = f"weights {rest[:_DIGITS_SHOWN]}"
    elif kind == "hub":
        name, _, revision = rest.rpartition("@")
        weights = f"{name} at {revision[:_DIGITS_SHOWN]}"
    if "weights_version" in facts:
        weights += f" named {facts['weights_version']!r}"
    parts = [weights, str(facts.get("dtype", "")).removeprefix("torch.")]
    if facts.get("kv_cache_dtype") not in (None, "auto"):
        parts.append(f"KV as {facts['kv_cache_dtype']}")
    if facts.get("quantization") not in (None, "None"):
        parts.append(str(facts["quantization"]))
    return ", ".join(part for part in parts if part)


def _layout(facts: Mapping[str, Any]) -> str:
    parts = [str(facts["physical_layout"])] if "physical_layout" in facts else []
    parts += _registered(facts.get("layout"))
    groups = facts.get("groups")
    groups = [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []
    layers = sum(len(group.get("layers", ())) for group in groups)
    if layers:
        parts.append(plural(layers, "layer"))
    if len(groups) > 1:
        parts.append(plural(len(groups), "group"))
    tokens = sorted({int(group["block_tokens"]) for group in groups if isinstance(group.get("block_tokens"), int)})
    per_chunk = facts.get("blocks_per_chunk", 1)
    if tokens:
        blocks = "" if per_chunk == 1 else f"{per_chunk} x "
        parts.append(f"{blocks}{' or '.join(map(str, tokens))} tokens per frame")
    return ", ".join(parts)


def _registered(layout: object) -> list[str]:
    """The chip and the attention backends that the first rank registered its caches with."""
    first = layout[0] if isinstance(layout, list) and layout else None
    if not isinstance(first, Mapping):
        return []
    chip = str(first.get("chip", ""))
    layers = first.get("layers")
    layers = [one for one in layers if isinstance(one, Mapping)] if isinstance(layers, list) else []
    backends = sorted({str(one["backend"]) for one in layers if "backend" in one})
    return [part for part in (chip if chip != "cpu" else "", " and ".join(backends)) if part]


def _versions(versions: object) -> str:
    if not isinstance(versions, Mapping):
        return ""
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def _parallel(parallel: object) -> str:
    if not isinstance(parallel, Mapping):
        return ""
    several = [f"{name.replace('_', ' ')} {size}" for name, size in parallel.items() if size != 1]
    return ", ".join(several) if several else "one rank"


def _hash(facts: Mapping[str, Any]) -> str:
    if "hash_algorithm" not in facts:
        return ""
    return f"{facts['hash_algorithm']}, seed {facts.get('hash_seed', '')}"


def _codec(codec: object) -> str:
    if not isinstance(codec, Mapping):
        return ""
    return f"encrypted with {codec.get('cipher')}, key id {codec.get('key_id')}"
