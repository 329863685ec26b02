"""A model by the name that a request gives, and what an error reveals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spillway_gateway.access.keys import Tenant
from spillway_gateway.errors import ClientBadRequest, ModelNotFound
from spillway_gateway.roster.served import named_model


def served(name: str) -> Any:
    return SimpleNamespace(fleet=SimpleNamespace(name=name))


ONE, TWO = served("one"), served("two")
MODELS = {"one": ONE, "alias": ONE, "two": TWO}
EVERYTHING = Tenant("")


def test_a_name_or_an_alias_finds_its_model() -> None:
    assert named_model(MODELS, "one", EVERYTHING) is named_model(MODELS, "alias", EVERYTHING) is ONE


def test_without_a_name_the_only_usable_model_is_meant() -> None:
    assert named_model(MODELS, None, Tenant("t", models=frozenset({"one"}))) is ONE
    with pytest.raises(ClientBadRequest, match="alias, one, two") as refused:
        named_model(MODELS, None, EVERYTHING)
    assert refused.value.param == "model"


def test_an_unknown_name_is_cut_and_lists_only_what_the_tenant_may_use() -> None:
    with pytest.raises(ModelNotFound) as refused:
        named_model(MODELS, "x" * 1000, Tenant("t", models=frozenset({"two"})))
    assert refused.value.message.endswith("served here: two")
    assert len(refused.value.message) < 300
