"""Text from outside does not break log lines."""

from __future__ import annotations

import io
import logging
from typing import Any

import aiohttp

from spillway_gateway.logs import LINE_CHARS_MAX, OneLineFormatter
from spillway_gateway.testing.running import gateway_config, running_gateway


def test_control_characters_in_a_message_are_escaped_and_a_traceback_keeps_its_lines() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(OneLineFormatter("%(levelname)s %(message)s"))
    logger = logging.Logger("x")
    logger.addHandler(handler)
    try:
        raise ValueError("inside")
    except ValueError:
        logger.exception("a\x85b\u2028c\nd %s", "e\x1b[0m")

    first, *rest = stream.getvalue().splitlines()
    assert first == "ERROR a\\u0085b\\u2028c\\u000ad e\\u001b[0m"
    assert rest[0].startswith("Traceback") and len(rest) > 2


def test_a_line_is_bounded_whatever_an_engine_or_client_wrote_into_it() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "engine %s: %s", ("e", "\n" * 1_000_000), None)

    line = OneLineFormatter("%(message)s").format(record)

    assert len(line) < 6 * LINE_CHARS_MAX + 100 and line.startswith("engine e: \\u000a")
    assert line.endswith("... (1000010 characters)")


async def test_a_request_id_is_taken_as_far_as_it_is_visible_ascii(start_engine: Any) -> None:
    engine = await start_engine()
    body = {"model": "fake", "messages": []}
    async with running_gateway(gateway_config([engine])) as running, aiohttp.ClientSession() as client:
        for given, seen in (("abc-1", "abc-1"), ("abc\x85def", "abc"), ("x" * 300, "x" * 256)):
            headers = {"x-request-id": given.encode().decode("latin-1") if given.isascii() else given}
            async with client.post(running.url + "/v1/chat/completions", json=body, headers=headers) as reply:
                assert reply.headers["x-request-id"] == seen

    assert [dict(each.headers)[b"x-request-id"] for each in engine.seen] == [b"abc-1", b"abc", b"x" * 256]
