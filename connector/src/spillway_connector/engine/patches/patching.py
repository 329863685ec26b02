"""Replacing functions of vLLM at run time: what a patch says of itself, and the one place that applies it.

A patch changes a function for all engines of this process, so what takes the function's place asks the engine at hand
for Spillway's connector and otherwise does what vLLM does. `vllm_patches.py` lists every
patch. No other module assigns a function to something of vLLM's;
connector/tests/engine/patches/test_patching.py holds that.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from spillway_connector.engine.generation import Methods, own_class, unsupported

_MARK = "_spillway_patches"  # on what takes a function's place: the names of the patches in it
_applied: dict[str, Patch] = {}


class Needed(Enum):
    """Processes that need a patch."""

    ENGINE_CORE = "every EngineCore"
    COMPUTE_WHILE_LOADING = "EngineCore, compute_while_loading: on"
    FAIR_STEPS = "EngineCore, fair_steps: on"
    LAYERWISE_LOADS = "EngineCore, layerwise_loads: on"
    LORA_WORKER = "workers with LoRA"


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One function of vLLM that is replaced or added.

    Attributes:
        name: What `spillway doctor` shows.
        place: `module:class` of vLLM's, or `module` if the function belongs to it.
        signature: The function with the parameters that vLLM declares, `name(self, more)`; the name alone if the
            function is added.
        replacement: `module:function` of what takes vLLM's function and returns the one that takes its place; a path,
            so that the lists import nothing of vLLM. None if the function is replaced on single objects, by
            `replace_on`.
        needed_by: Which processes need it.
        reason: What goes wrong without it.
        until: What vLLM must have before the patch can go.
        upstream: vLLM's issue or pull request; empty if none is known.
        may_be_missing: Whether older versions of the generation lack the function, so that there is nothing to replace.
    """

    name: str
    place: str
    signature: str
    replacement: str | None = None
    needed_by: Needed = Needed.ENGINE_CORE
    reason: str
    until: str
    upstream: str = ""
    may_be_missing: bool = False

    @property
    def module(self) -> str:
        return self.place.partition(":")[0]

    @property
    def cls(self) -> str:
        """Empty if the function belongs to the module."""
        return self.place.partition(":")[2]

    @property
    def function(self) -> str:
        """The function's name."""
        return self.signature.partition("(")[0]

    @property
    def parameters(self) -> list[str] | None:
        """The parameters that vLLM declares; None if the function is added."""
        _, declared, parameters = self.signature.partition("(")
        return parameters.rstrip(")").split(", ") if declared else None

    @property
    def target(self) -> str:
        return f"{self.cls or self.module.rpartition('.')[2]}.{self.function}"

    def owner(self) -> Any:
        """The class or module that holds the function."""
        return own_class(self.module, self.cls) if self.cls else importlib.import_module(self.module)

    def is_in_force(self) -> bool:
        return self.name in _patches_in(getattr(self.owner(), self.function, None))


def apply(patches: Iterable[Patch], needs: Collection[Needed]) -> None:
    """Put the patches in force in this process. Those that already are stay as they are.

    Args:
        patches: The generation's list.
        needs: What this process needs.

    Raises:
        UnsupportedEngine: vLLM's function takes other parameters, or a function that is to be added exists.
    """
    for patch in patches:
        if patch.replacement is None or patch.needed_by not in needs or patch.is_in_force():
            continue
        owner = patch.owner()
        original = getattr(owner, patch.function, None)
        if original is None and patch.may_be_missing:
            continue
        _check(patch, original)
        module, _, name = patch.replacement.partition(":")
        replacement = getattr(importlib.import_module(module), name)(original)
        if original is not None:
            functools.update_wrapper(replacement, original)
        setattr(replacement, _MARK, (*_patches_in(original), patch.name))
        setattr(owner, patch.function, replacement)
        _applied[patch.name] = patch


def in_force() -> str:
    """The names of the patches in force in this process, in the order in which they were applied, or `none`."""
    return " ".join(name for name, patch in _applied.items() if patch.is_in_force()) or "none"


def replace_on(thing: object, function: str, replacement: Callable[..., Any]) -> None:
    """Replace a method of one object of vLLM's, which lives as long as its engine.

    Args:
        thing: The object.
        function: The name of its method.
        replacement: What is called instead; it is not given the object.
    """
    setattr(thing, function, replacement)


@contextmanager
def replaced_on(thing: object, function: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Call `replace_on`, and undo it when the context is left."""
    replace_on(thing, function, replacement)
    try:
        yield
    finally:
        delattr(thing, function)


def patched_methods(patches: Iterable[Patch]) -> tuple[Methods, ...]:
    """Return the methods that the patches replace, for a generation's seams, without functions that may be missing."""
    return tuple(
        Methods(patch.module, patch.cls, {patch.function: patch.parameters})
        for patch in patches
        if patch.cls and patch.parameters is not None and not patch.may_be_missing
    )


def _check(patch: Patch, original: Any) -> None:
    if patch.parameters is None:
        if original is not None:
            raise unsupported(f"{patch.target} exists, which Spillway adds")
        return
    if original is None:
        raise unsupported(f"{patch.target} is missing")
    found = list(inspect.signature(original).parameters)
    if found != patch.parameters:
        raise unsupported(f"{patch.target} takes {found}, not {patch.parameters}")


def _patches_in(function: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = getattr(function, _MARK, ())
    return names
