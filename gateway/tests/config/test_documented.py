"""docs/gateway.md: the gateway reads every piece of configuration in it, and the page has every route and section."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from spillway_gateway.api.routes import ROUTES
from spillway_gateway.config.settings import GatewayConfig, parse_config

PAGE = Path(__file__).parents[3] / "docs" / "gateway.md"
SECTIONS = {field.encode_name for field in msgspec.structs.fields(GatewayConfig)}
ENGINE = {"name": "engine-0", "url": "http://127.0.0.1:8100"}
KEYS = {"keysFile": "/etc/keys.yaml", "saltSecretFile": "/etc/salt"}


def pieces(text: str) -> Iterator[dict[str, Any]]:
    for block in re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for document in yaml.safe_load_all(textwrap.dedent(block)):
            if document.keys() <= SECTIONS:
                yield document


def test_each_piece_of_configuration_is_read() -> None:
    found = list(pieces(PAGE.read_text(encoding="utf-8")))
    for piece in found:
        whole = {"models": [{"name": "model", "engines": [ENGINE]}]} | piece
        if "auth" in whole:
            whole["auth"] = KEYS | whole["auth"]
        parse_config(whole)
    assert {name for piece in found for name in piece} >= {"listen", "models", "auth", "tracing", "audit", "cors"}


def test_each_route_has_its_row() -> None:
    chapter = PAGE.read_text(encoding="utf-8").split("\n## Routes\n")[1].split("\n## ")[0]
    assert [route.path for route in ROUTES if f"{route.path}`" not in chapter] == []


def test_the_first_table_has_each_section() -> None:
    table = PAGE.read_text(encoding="utf-8").split("| section | decides |")[1].split("\n\n")[0]
    named = {name for cell in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)}
    assert named == SECTIONS
