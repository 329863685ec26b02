"""The facts about a model: the shape that values give, over that of files/model-shapes.yaml. Pure."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from spillway_ctl.check.chart_facts import facts
from spillway_ctl.check.finding import Finding, foreign_letter, quoted, size
from spillway_engine.drafters import drafter_of, with_drafter
from spillway_engine.model_shape import ModelShape
from spillway_settings.shared_names import MODEL_NAME_ENDINGS, QUANTIZED_EIGHTHS
from spillway_settings.values.engine import Engine

_ENDINGS = re.compile(MODEL_NAME_ENDINGS)
_EIGHTHS = {re.compile(form): share for form, share in QUANTIZED_EIGHTHS.items()}
_RECURRENT = re.compile(
    r"^(deepseek-v(3\.2|4)|qwen3-next|qwen3\.[5-9]|kimi-(k3|linear)|nemotron-h|jamba|falcon-h1|granite-4)"
)
_GIVEN = {
    "layers": "layers",
    "sliding_layers": "slidingLayers",
    "kv_heads": "kvHeads",
    "head_dim": "headDim",
    "latent_dim": "latentDim",
    "dtype": "dtype",
    "weight_bytes": "weightBytes",
}
_DECIDING = ("layers", "kvHeads", "headDim", "latentDim")  # with another one the preset's groups are not the model's
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_ODD_FOLDER = re.compile(r"(/\.\.?(/|$)|\s$)")


class ModelFacts(msgspec.Struct, frozen=True):
    """shape: The shape of its KV cache. heads: The number of attention heads; 0: not known."""

    shape: ModelShape
    heads: int


def is_model_path(path: str) -> bool:
    """Whether it is an absolute folder, or a name of a hub."""
    return _ODD_FOLDER.search(path) is None if path.startswith("/") else _HUB_NAME.fullmatch(path) is not None


def meant_hub_name(path: str) -> str | None:
    """The hub's name in a page's address, before a revision, or without blanks; None: there is none, or it is one."""
    bare = re.sub(r"^(hf://|https?://(www\.)?(huggingface|hf)\.co/)", "", path.strip()).rstrip("/")
    bare = re.sub(r"[:@][^/]*$", "", bare)
    return bare if bare != path and _HUB_NAME.fullmatch(bare) else None


def model_facts(engine: Engine, path: str) -> tuple[ModelFacts, list[Finding]]:
    """The model's shape, and what is wrong with what the values say of it."""
    given = engine.model.shape
    known = facts("model-shapes.yaml")
    file = engine.model.path.rstrip("/").rsplit("/", 1)[-1].lower()
    plain = file.removeprefix("meta-")
    name = file if file in known else _ENDINGS.sub("", plain)
    eighths = 8
    if plain.startswith(name) and not given.preset:
        ending = plain.removeprefix(name)
        eighths = max((share for form, share in _EIGHTHS.items() if form.search(ending)), default=8)
    found = []
    if given.preset in known and name in known and known[name] != known[given.preset] and engine.model.path[0] != "/":
        found.append(
            Finding(
                f"{path}.model.shape.preset",
                f"{given.preset}, but {engine.model.path} is known by itself, with another KV cache or other weights",
                "remove it, unless another model has this name in your hub",
                is_note=True,
            )
        )
    name = given.preset or name
    if given.preset and name not in known:
        found.append(
            Finding(
                f"{path}.model.shape.preset",
                f"{quoted(name)} is no known model",
                f"give layers, kvHeads and headDim from its config.json, or one of: {', '.join(sorted(known))}",
            )
        )
    shape: dict[str, Any] = {"dtype": "bfloat16", "weightBytes": 0, **known.get(name, {})}
    quantized = eighths < 8
    if quantized:
        shape["weightBytes"] = int(shape["weightBytes"]) * eighths // 8
    for field, key in _GIVEN.items():
        value = getattr(given, field)
        if value is not None:
            shape[key] = value
            if key in ("kvHeads", "headDim"):
                shape.pop("latentDim", None)
            if key in _DECIDING:
                for of_preset in ("stateLayers", "packed", *(("slidingLayers",) if key == "layers" else ())):
                    shape.pop(of_preset, None)
    if shape.get("layers") and shape.get("slidingLayers", 0) > shape["layers"]:
        layers, sliding = shape["layers"], shape.pop("slidingLayers")
        found.append(
            Finding(
                f"{path}.model.shape.slidingLayers",
                f"{sliding} of {layers} layers",
                f"set it to the number of sliding_attention in layer_types of config.json, {layers} or less",
            )
        )
    if given.latent_dim and (given.kv_heads or given.head_dim):
        found.append(
            Finding(
                f"{path}.model.shape",
                f"latentDim: {given.latent_dim} given beside kvHeads or headDim, but a model has one kind of cache",
                "keep latentDim for MLA, or the other two",
            )
        )
    if not (shape.get("layers") and (shape.get("latentDim") or (shape.get("kvHeads") and shape.get("headDim")))):
        if is_model_path(engine.model.path) or foreign_letter(engine.model.path):  # else model_rules says what is wrong
            found.append(_unknown(engine, path, file, known))
        shape |= {"layers": 1, "kvHeads": 1, "headDim": 1}
    model_shape = ModelShape(
        layers=shape["layers"],
        kv_heads=shape.get("kvHeads", 0),
        head_dim=shape.get("headDim", 0),
        latent_dim=shape.get("latentDim"),
        dtype=shape["dtype"],
        max_length=shape.get("maxLength"),
        weight_bytes=size(shape["weightBytes"]),
        experts=shape.get("experts", 0),
        quantized=quantized,
        sliding_layers=shape.get("slidingLayers", 0),
        window_tokens=shape.get("slidingWindow", 0),
        state_layers=shape.get("stateLayers", 0),
        state_bytes=shape.get("stateBytes", 0),
        packed=shape.get("packed", ""),
    )
    drafter = drafter_of(engine.extra_args)
    if drafter is not None and not drafter.is_counted and given.draft_layers is None:
        found.append(
            Finding(
                f"{path}.model.shape.draftLayers",
                f"the drafter {drafter.model} says in its config.json alone how many layers it has, and "
                f"{drafter.layers} are counted",
                "give their number, in layers of the model's size",
                is_note=True,
            )
        )
    model_shape = with_drafter(model_shape, engine.extra_args, given.draft_layers)
    return ModelFacts(model_shape, shape.get("heads", 0)), found


def _unknown(engine: Engine, path: str, file: str, known: dict[str, Any]) -> Finding:
    family = re.match("[a-z]+", file)
    alike = sorted(each for each in known if family and re.match("[a-z]+", each)[0] == family[0])  # type: ignore[index]
    why = "is no model the chart knows, so its KV cache has no known size"
    if _RECURRENT.match(file):
        why = (
            "keeps recurrent or compressed states beside its KV cache, whose blocks vLLM sizes when it starts; an "
            "engine's `spillway doctor` shows them as `row of the CPU tier`"
        )
    if foreign := foreign_letter(engine.model.path):
        return Finding(
            f"{path}.model.path",
            f"{quoted(engine.model.path)} has {foreign} in it, and is no model the chart knows",
            "type it again, or set model.shape if it is meant so",
        )
    return Finding(
        f"{path}.model.path",
        f"{quoted(engine.model.path)} {why}",
        f"set {path}.model.shape.layers, kvHeads and headDim (or latentDim for MLA) from its config.json, or "
        f"{path}.model.shape.preset to the known model that it is made from: "
        f"{', '.join(alike) or 'one of files/model-shapes.yaml, such as qwen3-8b'}",
    )
