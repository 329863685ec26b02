from __future__ import annotations

import json
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import spillway_gateway.client.bounded_connection
import spillway_gateway.upstream.relay  # noqa: F401 - rooms have errors of their own
from spillway_gateway.error_bodies import (
    RETRY_JITTER_SECONDS_MAX,
    Dialect,
    body_of,
    event_of,
    headers_of,
    response_of,
)
from spillway_gateway.errors import EngineDisconnected, GatewayError, GatewayOverloaded, KeyMissing, TenantLimited


def test_each_dialect_has_its_shape() -> None:
    error = KeyMissing("no key")
    assert json.loads(body_of(error)) == {
        "error": {"message": "no key", "type": "invalid_request_error", "param": None, "code": "missing_api_key"}
    }
    assert body_of(error, Dialect.RESPONSES) == body_of(error)
    assert json.loads(body_of(error, Dialect.ANTHROPIC)) == {
        "type": "error",
        "error": {"type": "authentication_error", "message": "no key"},
    }


def test_a_responses_event_has_the_next_number() -> None:
    last = b'event: a\ndata: {"sequence_number":4}\n\nevent: b\ndata: {"sequence_number": 5, "x":'
    event = event_of(EngineDisconnected("gone"), Dialect.RESPONSES, at_event_boundary=False, last_chunk=last)
    assert event.startswith(b"\n\nevent: error\ndata: ")
    assert json.loads(event.partition(b"data: ")[2])["sequence_number"] == 6


def all_errors(cls: type[GatewayError]) -> list[type[GatewayError]]:
    return [cls, *(error for below in cls.__subclasses__() for error in all_errors(below))]


PAGE = Path(__file__).parents[2] / "docs" / "gateway.md"
SOURCE = Path(__file__).parents[1] / "src" / "spillway_gateway"


def test_docs_have_every_status_with_its_code() -> None:
    """The errors of all rooms, and refusals of what is no request yet."""
    chapter = PAGE.read_text(encoding="utf-8").split("## Errors that clients get")[1].split("\n## ")[0]
    documented = {
        (int(status), code)
        for statuses, codes in re.findall(r"^\| ([\d, ]+) \| ([^|]*) \|", chapter, re.MULTILINE)
        for status in statuses.split(", ")
        for code in re.findall(r"`(\w+)`", codes)
    }
    client = (SOURCE / "client" / "bounded_connection.py").read_text(encoding="utf-8")
    refusals = re.findall(r'Refusal\(\s*(\d+),\s*"(\w+)"', client)
    assert len(refusals) > 5
    raised = {(error.status, error.code) for error in all_errors(GatewayError)}
    assert {*raised, *((int(status), code) for status, code in refusals)} <= documented
    rooms = "\n".join(path.read_text(encoding="utf-8") for path in (SOURCE / "api").glob("*.py"))
    named = set(re.findall(r'code="(\w+)"|message, code = f".*", "(\w+)"', rooms))
    assert {code for pair in named for code in pair if code} <= {code for _, code in documented}


def test_every_status_has_an_anthropic_type() -> None:
    statuses = {error.status for error in all_errors(GatewayError)}
    for status in statuses:
        error = GatewayError("x")
        error.status = status
        kind = json.loads(body_of(error, Dialect.ANTHROPIC))["error"]["type"]
        assert kind.endswith("_error") or kind == "request_too_large"


@given(st.integers(1, 3600))
def test_retry_after_is_never_early_and_little_late(seconds: int) -> None:
    ((_, given_seconds),) = [pair for pair in headers_of(TenantLimited("x", seconds)) if pair[0] == b"retry-after"]
    assert seconds <= int(given_seconds) <= seconds + RETRY_JITTER_SECONDS_MAX


def test_refused_clients_do_not_all_retry_at_once() -> None:
    waits = {dict(headers_of(GatewayOverloaded("full")))[b"retry-after"] for _ in range(200)}
    assert len(waits) > 1


def test_routes_of_the_framework_say_when_to_return_as_the_others_do() -> None:
    for kind in all_errors(GatewayError):
        error = GatewayError("why", kind.retry_after_seconds)
        error.status = kind.status
        response = response_of(error, {"x-more": "1"})
        assert (response.status_code, response.body) == (error.status, body_of(error))
        assert response.headers["x-more"] == "1" and response.headers["content-type"] == "application/json"
        assert ("retry-after" in response.headers) == (error.retry_after_seconds is not None)
    sources = {
        path: path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py") if path.name != "error_bodies.py"
    }
    assert [str(path) for path, text in sources.items() if re.search(r"Response\(\s*body_of\(", text)] == []
