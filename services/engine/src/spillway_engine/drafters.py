"""The memory that speculative decoding adds to a model's KV cache, by the arguments of vLLM.

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
# Methods, or names of drafters, with layers of KV beside the model's own, and how many: DSpark's in DeepSeek's
# checkpoints (vllm/models/deepseek_v4/nvidia/dspark.py), those of EAGLE, and a model's own for later tokens.
_LAYERS = ((re.compile(r"dspark"), 3), (re.compile(r"eagle|dflash|mtp$"), 1))
# Drafters whose weights may be in the model's own folder.
_OF_THE_MODEL = re.compile(r"dspark|mtp$")
_ANY_SIZE = re.compile(r"dspark|dflash|draft_model|")  # if the drafter is a model of its own


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter, as the arguments describe it.

    Args:
        method: vLLM's name of the method; empty: vLLM finds it out.
        model: The folder or hub name of a drafter with weights of its own; empty: it has none.
    """

    method: str = ""
    model: str = ""

    @property
    def layers(self) -> int:
        """Number of layers that the method has, or that the drafter's name lets expect."""
        named = self.method or self.model.lower()
        return next((layers for kind, layers in _LAYERS if kind.search(named)), 0)

    @property
    def is_counted(self) -> bool:
        """Whether `layers` is right without a look at the drafter: False for a model of its own of any size."""
        has_any_size = _ANY_SIZE.fullmatch(self.method) is not None
        return not self.model or not has_any_size or (not self.method and "eagle" in self.model.lower())


def drafter_of(arguments: Sequence[str]) -> Drafter | None:
    """Return the drafter that the arguments name; None: nothing speculates. Of an argument the last value counts."""
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
        shape: The model's shape.
        arguments: vLLM's arguments.
        layers: How many there are, counted in layers of the model's size; None: as many as the drafter's folder says,
            or the method has.
    """
    drafter = drafter_of(arguments)
    if drafter is None:
        return shape
    if layers is None:
        layers = drafter.layers
        own = _shape_in(drafter.model)
        if own is not None and not (_OF_THE_MODEL.search(drafter.method) and _is_alike(own, shape)):
            layers = -(-own.layers * own.layer_elements // shape.layer_elements)
        elif drafter.method == "dspark":
            layers = max(layers, shape.own_draft_layers)
        elif drafter.method.endswith("mtp"):
            layers = shape.own_draft_layers
    return replace(shape, speculates=True, draft_layers=layers)


def _is_alike(own: ModelShape, shape: ModelShape) -> bool:
    """Whether a drafter's folder is the model's, of which the drafter has only some layers."""
    return (own.layers, own.layer_elements) == (shape.layers, shape.layer_elements)


def _shape_in(folder: str) -> ModelShape | None:
    """The shape of the drafter in a folder; None: there is no such folder, or it describes no layer with attention."""
    if not folder or not os.path.isdir(folder):
        return None
    try:
        return load_model_shape(folder)
    except ModelShapeError:  # Medusa's heads, for example; vLLM refuses what is no model
        return None
