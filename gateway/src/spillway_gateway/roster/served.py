"""A model in service, and its look-up by the name that a request gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from spillway_gateway.access.keys import Tenant
from spillway_gateway.errors import ClientBadRequest, ModelNotFound
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.tokens.prompt import PromptReader

_SHOWN_CHARS_MAX = 200  # of a name that a client made up
_SHOWN_NAMES_MAX = 50


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model's engines, and the reader that turns its prompts into block hashes."""

    fleet: ModelFleet
    reader: PromptReader


class Named(NamedTuple):
    """The model that a request names. adapter: the LoRA adapter, by the name that engines know; None: no adapter."""

    served: ServedModel
    adapter: str | None = None


def named_model(models: Mapping[str, ServedModel], model: str | None, tenant: Tenant) -> Named:
    """The model or adapter that a request names. models: by every name in the configuration.

    Those names come first. Then come adapters that an engine has loaded, then adapters that engines would load for a
    tenant that may use them, in the order of the configuration. A request without a name gets the only model that the
    tenant may use, as an engine with one model does. Raises ModelNotFound, and ClientBadRequest for a missing name;
    both list what the tenant may use.
    """
    served = models.get(model) if model is not None else None
    if served is not None:
        assert model is not None
        return Named(served, served.fleet.config.adapter_named(model))
    distinct = {id(served): served for served in models.values()}.values()
    if model is not None:
        for served in distinct:
            if served.fleet.lists_adapter(model):
                return Named(served, model)
        for served in distinct:
            if served.fleet.config.loads(model) and (tenant.may_use(model) or tenant.may_use(served.fleet.name)):
                return Named(served, model)
    usable = {
        name: served for name, served in models.items() if tenant.may_use(name) or tenant.may_use(served.fleet.name)
    }
    if model is None:
        if len({id(served) for served in usable.values()}) == 1:
            return Named(next(iter(usable.values())))
        raise ClientBadRequest("'model' is missing; name one of: " + ", ".join(sorted(usable)), "model")
    adapters = {
        name
        for served in distinct
        for name in served.fleet.loaded_adapters()
        if tenant.may_use(name) or tenant.may_use(served.fleet.name)
    }
    raise model_not_found(model, usable.keys() | adapters)


def model_not_found(model: str, usable: Iterable[str]) -> ModelNotFound:
    """usable: the names that the tenant may use instead."""
    shown = model if len(model) <= _SHOWN_CHARS_MAX else model[:_SHOWN_CHARS_MAX] + "..."
    names = sorted(usable)
    more = [f"{len(names) - _SHOWN_NAMES_MAX} more"] if len(names) > _SHOWN_NAMES_MAX else []
    served_here = ", ".join(names[:_SHOWN_NAMES_MAX] + more)
    return ModelNotFound(f"The model {shown!r} does not exist; served here: {served_here}")
