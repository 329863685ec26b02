"""What speculative decoding adds to a model's KV cache, as arguments of vLLM ask for it.

The chart reads the same from the same arguments in templates/_memory.tpl; tests/chart/test_template_arithmetic.py
compares.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spillway_engine.errors import ModelShapeError
from spillway_engine.model_shape import ModelShape, load_model_shape

_CONFIG = "--speculative-config"
_SHORT = {"--spec-method": f"{_CONFIG}.method", "--spec-model": f"{_CONFIG}.model"}
_IS_GIVEN = re.compile(r"(--speculative-config([.].*)?|--spec-(method|model|tokens))")
# Methods whose drafter has layers with KV beside the model's own: EAGLE's, and a model's own layers for later tokens.
_WITH_LAYERS = re.compile(r"eagle|mtp$")


@dataclass(frozen=True, slots=True)
class Drafter:
    """What arguments say of it.

    Args:
        method: vLLM's name of the method; empty: vLLM finds it out.
        model: The folder or hub name of a drafter with weights of its own; empty: it has none.
    """

    method: str = ""
    model: str = ""

    @property
    def has_layers(self) -> bool:
        return _WITH_LAYERS.search(self.method or self.model.lower()) is not None


def drafter_of(arguments: Sequence[str]) -> Drafter | None:
    """None: nothing speculates. Of an argument the last value counts."""
    given: dict[str, str] = {}
    waiting = ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        name = re.sub(r"^-sc(?=$|[.])", _CONFIG, name.replace("_", "-"))
        if waiting:
            given[waiting] = argument
        given[name], waiting = value, "" if equals else name
    asked = {_SHORT.get(name, name): value for name, value in given.items() if _IS_GIVEN.fullmatch(name)}
    if not asked:
        return None
    try:
        config = json.loads(asked.get(_CONFIG) or "{}")
    except (ValueError, RecursionError):  # refused by vLLM
        config = {}
    if not isinstance(config, Mapping):
        config = {}
    method, model = (str(asked.get(f"{_CONFIG}.{key}") or config.get(key) or "") for key in ("method", "model"))
    return Drafter(method, model)


def with_drafter(shape: ModelShape, arguments: Sequence[str], layers: int | None = None) -> ModelShape:
    """The shape with the layers that a drafter adds.

    Args:
        shape: Of the model.
        arguments: Of vLLM.
        layers: How many there are, counted in layers of the model's size; None: as many as the drafter's folder says,
            or the method has.
    """
    drafter = drafter_of(arguments)
    if drafter is None:
        return shape
    if layers is None:
        layers = 1 if drafter.has_layers else 0
        own = _shape_in(drafter.model)
        if own is not None:
            layers = -(-own.layers * own.layer_elements // shape.layer_elements)
        elif drafter.method.endswith("mtp"):
            layers = shape.own_draft_layers
    return replace(shape, speculates=True, draft_layers=layers)


def _shape_in(folder: str) -> ModelShape | None:
    """The shape of the drafter in a folder; None: there is no such folder, or it describes no layer with attention."""
    if not folder or not os.path.isdir(folder):
        return None
    try:
        return load_model_shape(folder)
    except ModelShapeError:  # Medusa's heads, for example; vLLM refuses what is no model
        return None
