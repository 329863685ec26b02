"""The document at /openapi.json, and the routes that it is made of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from spillway_gateway.access.keys import hash_key
from spillway_gateway.api.openapi import openapi_document
from spillway_gateway.api.routes import ROUTES
from spillway_gateway.app import Gateway
from spillway_gateway.config.settings import parse_config
from spillway_gateway.error_bodies import Dialect
from spillway_gateway.testing.running import gateway_config, running_gateway


async def document_of(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as client, client.get(url + "/openapi.json") as reply:
        assert reply.status == 200
        document: dict[str, Any] = await reply.json()
    return document


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


async def test_it_names_every_route_and_the_shape_of_every_error(start_engine: Any) -> None:
    async with running_gateway(gateway_config([await start_engine()])) as running:
        document = await document_of(running.url)
        again = await document_of(running.url)

    assert document == again and document["openapi"].startswith("3.1")
    others = {"/v1/models", "/v1/models/{model}", "/health", "/ready"}
    stored = {"/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"}
    assert document["paths"].keys() == {route.path for route in ROUTES} | others | stored
    for route in ROUTES:
        operation = document["paths"][route.path]["post"]
        assert operation["requestBody"]["required"]
        error = "AnthropicError" if route.dialect is Dialect.ANTHROPIC else "Error"
        for status in ("400", "401", "403", "404", "408", "413", "429", "502", "503", "504"):
            schema = operation["responses"][status]["content"]["application/json"]["schema"]
            assert schema == {"$ref": f"#/components/schemas/{error}"}
        assert {"200", "default"} <= operation["responses"].keys()
    schemas = document["components"]["schemas"]
    assert {name.rpartition("/")[2] for name in references(document)} <= schemas.keys()
    assert schemas["ErrorDetail"]["required"] == ["message", "type", "param", "code"]
    assert document["paths"]["/v1/models/{model}"]["get"]["parameters"][0]["name"] == "model"
    assert "security" not in document


def test_it_names_what_is_routed_and_nothing_else() -> None:
    config = {"models": [{"name": "fake", "engines": [{"name": "fake-0", "url": "http://127.0.0.1:9"}]}]}
    application: Any = Gateway(parse_config(config)).app.framework
    routed = {
        (route.path.replace(":path", ""), method.lower())
        for route in application.routes
        if not route.path.startswith(("/openapi.json", "/ui", "/metrics", "/spillway/"))
        for method in route.methods - {"HEAD"}
    }
    paths = openapi_document(keys=False)["paths"]
    assert {(path, method) for path, operations in paths.items() for method in operations} == routed


def test_every_operation_has_an_id_of_its_own_that_is_an_identifier() -> None:
    """Generators of clients name their methods by it."""
    operations = [each for path in openapi_document(keys=False)["paths"].values() for each in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert {"post_v1_chat_completions", "post_score", "post_v1_score", "get_v1_models_model"} <= set(ids)
    assert len(ids) == len(set(ids)) and all(name.isidentifier() for name in ids)


async def test_with_keys_every_route_but_the_probes_needs_one(start_engine: Any, tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"tenants": [{"name": "a", "keys": [hash_key("k" * 32)]}]}))
    (tmp_path / "secret").write_bytes(b"x" * 32)
    auth = {"keysFile": str(tmp_path / "keys.yaml"), "saltSecretFile": str(tmp_path / "secret")}
    async with running_gateway(gateway_config([await start_engine()], auth=auth)) as running:
        document = await document_of(running.url)

    (scheme,) = document["components"]["securitySchemes"]
    assert document["security"] == [{scheme: []}]
    assert document["paths"]["/health"]["get"]["security"] == []
    assert "security" not in document["paths"]["/v1/chat/completions"]["post"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_framework_serves_a_raw_route_as_the_dispatch_does(start_engine: Any, path: str) -> None:
    engine = await start_engine()
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    answers = []
    async with running_gateway(gateway_config([engine])) as running:
        dispatch = running.server.config.loaded_app
        for endpoints in (dict(dispatch._endpoints), {}):
            dispatch._endpoints = endpoints
            async with aiohttp.ClientSession() as client, client.post(running.url + path, json=body) as reply:
                answers.append((reply.status, json.loads(await reply.read())["choices"]))

    assert answers[0] == answers[1] and answers[0][0] == 200
    assert engine.seen[0].body == engine.seen[1].body
