"""Imports follow the data: api -> tokens -> upstream -> fleet -> routing, and routing knows no other room."""

from __future__ import annotations

import ast
from pathlib import Path

import spillway_gateway

ROOT = Path(spillway_gateway.__file__).parent
ALLOWED = {
    "access": set(),
    "discovery": set(),
    "routing": set(),
    "fleet": {"routing"},
    "tokens": {"fleet", "routing"},
    "upstream": {"access", "fleet", "routing"},
    "api": {"access", "discovery", "fleet", "routing", "tokens", "upstream"},
}


def test_no_room_imports_against_the_arrow() -> None:
    broken = []
    for room, allowed in ALLOWED.items():
        for path in (ROOT / room).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("spillway_gateway."):
                    other = node.module.split(".")[1]
                    if other in ALLOWED and other != room and other not in allowed:
                        broken.append(f"{path.relative_to(ROOT)}:{node.lineno} imports {node.module}")
                    if other == "testing":
                        broken.append(f"{path.relative_to(ROOT)}:{node.lineno} imports test code")
    assert broken == []
