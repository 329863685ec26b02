"""YAML in which no mapping names a key twice: which of the two counts is the parser's secret.

libyaml takes a third of PyYAML's time, but never lets other threads run, and 100,000 brackets end the process.
"""

from __future__ import annotations

from typing import Any

import yaml


class GivenUp(Exception):
    """The result of the reading is not needed any more."""


class Reading:
    """Readings of files on threads, which end soon after give_up()."""

    def __init__(self) -> None:
        self.given_up = False

    def give_up(self) -> None:
        """The process ends: every turn of a thread that reads on would delay it by milliseconds."""
        self.given_up = True


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str, reading: Reading) -> None:
        super().__init__(text)
        self._reading = reading

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._reading.given_up:
            raise GivenUp
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if self._reading.given_up:
            raise GivenUp
        return super().construct_object(node, deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if isinstance(key, yaml.ScalarNode) and name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is there twice; remove one", key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


def load(text: str, reading: Reading | None = None) -> Any:
    """Raises yaml.YAMLError, and GivenUp once `reading` is."""
    loader = _Loader(text, reading or Reading())
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
