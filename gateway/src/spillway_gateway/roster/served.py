"""A model in service, and its look-up by the name that a request gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spillway_gateway.access.keys import Tenant
from spillway_gateway.errors import ClientBadRequest, ModelNotFound
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.tokens.prompt import PromptReader

_SHOWN_CHARS_MAX = 200  # of a name that a client made up


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model's engines, and the reader that turns its prompts into block hashes."""

    fleet: ModelFleet
    reader: PromptReader


def named_model(models: Mapping[str, ServedModel], model: str | None, tenant: Tenant) -> ServedModel:
    """The model that a request names. models: by name and by alias.

    A request without a name gets the only model that the tenant may use, as an engine with one model does. Raises
    ModelNotFound, and ClientBadRequest for a missing name; both list what the tenant may use.
    """
    served = models.get(model) if model is not None else None
    if served is not None:
        return served
    usable = {
        name: served for name, served in models.items() if tenant.may_use(name) or tenant.may_use(served.fleet.name)
    }
    if model is None:
        if len({id(served) for served in usable.values()}) == 1:
            return next(iter(usable.values()))
        raise ClientBadRequest("'model' is missing; name one of: " + ", ".join(sorted(usable)), "model")
    raise model_not_found(model, usable)


def model_not_found(model: str, usable: Iterable[str]) -> ModelNotFound:
    """usable: the names that the tenant may use instead."""
    shown = model if len(model) <= _SHOWN_CHARS_MAX else model[:_SHOWN_CHARS_MAX] + "..."
    return ModelNotFound(f"The model {shown!r} does not exist; served here: {', '.join(sorted(usable))}")
