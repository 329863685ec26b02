"""Parts of objects on classes of this file's own, which stand for vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from spillway_connector.testing.vllm_parts import part_of


@dataclass(slots=True)
class Base:
    started: str


class Engine(Base):
    def __init__(self) -> None:
        self.scheduler = object()
        raise AssertionError("it would start an engine")

    @property
    def is_busy(self) -> bool:
        raise AssertionError("it would ask the scheduler")

    def name(self) -> str:
        return f"{self.started} {self.scheduler} {self.is_busy}"


def test_a_part_has_the_methods_of_its_class() -> None:
    part = part_of(Engine, scheduler="s", started="now", is_busy=False)
    assert isinstance(part, Engine)
    assert part.name() == "now s False"
    assert not hasattr(part_of(Engine), "scheduler")


def test_an_attribute_that_the_class_does_not_name_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"Engine of this vLLM names no schedulers, busy$"):
        part_of(Engine, scheduler="s", schedulers=[], busy=True)
