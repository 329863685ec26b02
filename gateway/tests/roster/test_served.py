"""A model by the name that a request gives, and what an error reveals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spillway_gateway.access.keys import Tenant
from spillway_gateway.config.settings import ModelConfig
from spillway_gateway.errors import ClientBadRequest, ModelNotFound
from spillway_gateway.roster.served import named_model


def served(name: str, loaded: frozenset[str] = frozenset(), **settings: Any) -> Any:
    fleet = SimpleNamespace(
        name=name,
        config=ModelConfig(name, **settings),
        lists_adapter=lambda adapter: adapter in loaded,
        loaded_adapters=lambda: loaded,
    )
    return SimpleNamespace(fleet=fleet)


ONE, TWO = served("one"), served("two")
MODELS = {"one": ONE, "alias": ONE, "two": TWO}
EVERYTHING = Tenant("")


def test_a_name_or_an_alias_finds_its_model() -> None:
    assert named_model(MODELS, "one", EVERYTHING) == named_model(MODELS, "alias", EVERYTHING) == (ONE, None)


def test_without_a_name_the_only_usable_model_is_meant() -> None:
    assert named_model(MODELS, None, Tenant("t", models=frozenset({"one"}))) == (ONE, None)
    with pytest.raises(ClientBadRequest, match="alias, one, two") as refused:
        named_model(MODELS, None, EVERYTHING)
    assert refused.value.param == "model"


def test_an_unknown_name_is_cut_and_lists_only_what_the_tenant_may_use() -> None:
    with pytest.raises(ModelNotFound) as refused:
        named_model(MODELS, "x" * 1000, Tenant("t", models=frozenset({"two"})))
    assert refused.value.message.endswith("served here: two")
    assert len(refused.value.message) < 300


def test_a_configured_name_comes_before_a_loaded_adapter_and_that_before_a_loadable_one() -> None:
    one = served("one", frozenset({"two", "sql", "hidden"}), adapter_aliases={"latest": "sql"})
    two = served("two", frozenset({"late-1"}), loadable_adapters=("late-*", "sql"))
    models = {"one": one, "latest": one, "two": two}
    named = {name: named_model(models, name, EVERYTHING) for name in ("two", "sql", "latest", "late-1", "late-2")}
    assert named == {
        "two": (two, None),
        "sql": (one, "sql"),
        "latest": (one, "sql"),
        "late-1": (two, "late-1"),
        "late-2": (two, "late-2"),
    }
    only_one = Tenant("t", models=frozenset({"one"}))
    with pytest.raises(ModelNotFound, match="served here: hidden, latest, one, sql, two"):
        named_model(models, "late-2", only_one)
    assert named_model(models, "late-2", Tenant("t", models=frozenset({"late-2"}))) == (two, "late-2")


@pytest.mark.parametrize("name", ["../other", "/etc/adapter", "a/b", ".hidden", "", "a" * 129, "a\n", "..", "a b"])
def test_a_name_that_is_more_than_a_folders_name_is_loaded_by_no_engine(name: str) -> None:
    with pytest.raises(ModelNotFound):
        named_model({"one": served("one", loadable_adapters=("*",))}, name, EVERYTHING)
