"""YAML in which no mapping names a key twice: which of the two counts is the parser's secret."""

from __future__ import annotations

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
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


def load(text: str) -> Any:
    """Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)  # noqa: S506 - a safe loader
