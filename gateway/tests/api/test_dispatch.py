from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import aiohttp
import pytest

from spillway_gateway.api.dispatch import InferenceDispatch
from spillway_gateway.client.cors import Cors
from spillway_gateway.config.cors import CorsConfig
from spillway_gateway.testing.running import gateway_config, running_gateway


def scope(method: str, path: str) -> dict[str, Any]:
    return {"type": "http", "method": method, "path": path}


class Sent(list[MutableMapping[str, Any]]):
    """The messages that an application sent; like a server, it takes only one start."""

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start" and self:
            raise RuntimeError("a reply has begun")
        self.append(message)


async def nothing() -> MutableMapping[str, Any]:
    raise AssertionError("this body is not read")


async def test_only_posts_to_known_paths_go_past_the_framework() -> None:
    taken: list[tuple[str, str]] = []

    async def endpoint(scope: Any, receive: Any, send: Any) -> None:
        taken.append(("endpoint", scope["path"]))

    async def framework(scope: Any, receive: Any, send: Any) -> None:
        taken.append(("framework", scope.get("path", "")))

    dispatch = InferenceDispatch({"/known": endpoint}, framework, Cors(CorsConfig()))
    for each in (scope("POST", "/known"), scope("GET", "/known"), scope("POST", "/other"), {"type": "lifespan"}):
        await dispatch(each, nothing, Sent())

    assert taken == [("endpoint", "/known"), ("framework", "/known"), ("framework", "/other"), ("framework", "")]


async def test_a_defect_is_a_500_and_after_the_start_nothing_more() -> None:
    async def fails_at_once(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("a defect")

    async def fails_in_the_middle(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("a defect")

    dispatch = InferenceDispatch(
        {"/at-once": fails_at_once, "/later": fails_in_the_middle}, fails_at_once, Cors(CorsConfig())
    )
    at_once, later = Sent(), Sent()
    await dispatch(scope("POST", "/at-once"), nothing, at_once)
    await dispatch(scope("POST", "/later"), nothing, later)

    assert at_once[0]["status"] == 500 and b"internal_error" in at_once[1]["body"]
    assert [message.get("status") for message in later] == [200]


async def test_other_methods_keep_their_error(start_engine: Any) -> None:
    engine = await start_engine()
    async with (
        running_gateway(gateway_config([engine])) as running,
        aiohttp.ClientSession() as client,
        client.get(running.url + "/v1/chat/completions") as reply,
    ):
        assert reply.status == 405
        assert (await reply.json())["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/health", "/ready", "/openapi.json", "/metrics"])
async def test_routes_of_get_serve_head_and_name_both(start_engine: Any, path: str) -> None:
    engine = await start_engine()
    async with running_gateway(gateway_config([engine])) as running, aiohttp.ClientSession() as client:
        async with client.head(running.url + path) as reply:
            assert reply.status == 200 and await reply.read() == b""
        async with client.put(running.url + path) as reply:
            assert reply.status == 405
            assert {method.strip() for method in reply.headers["allow"].split(",")} == {"GET", "HEAD"}
