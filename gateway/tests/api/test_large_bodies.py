"""Long bodies are read in small steps, with the same result as short ones."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

import pytest

from spillway_gateway.api.large_bodies import (
    _COUNT_BYTES,
    _STEP_BYTES,
    IDS_MAX,
    PARSE_SECONDS_MAX,
    VALUES_MAX,
    LargeBodies,
)
from spillway_gateway.api.parsed_body import ParsedBody
from spillway_gateway.api.routes import ROUTES, ApiRoute
from spillway_gateway.errors import ClientBadRequest, RequestTooLarge
from spillway_gateway.tokens.prompt import CompletionPrompt, RawPrompt
from spillway_gateway.upstream.splice import insert_member, replace_text

TEXT_BYTES_MAX = 1000


def route(path: str) -> ApiRoute:
    return next(route for route in ROUTES if route.path == path)


CHAT, COMPLETION = route("/v1/chat/completions"), route("/v1/completions")


def encoded(**body: Any) -> bytes:
    return json.dumps(body).encode()


async def parsed(body: bytes | bytearray, of: ApiRoute = CHAT) -> ParsedBody:
    return await LargeBodies().parse(of, body, TEXT_BYTES_MAX)


CHEAP = [
    encoded(model="m", stream=True, messages=[{"role": "user", "content": "The quick, brown fox. " * 5_000}]),
    encoded(model="m", messages=[{"role": "user", "content": '{"a": [1, 2]}, ' * 10_000}], cache_salt="s"),
    encoded(model="m", messages=[], extra="x" * 3_000_000),
]


@pytest.mark.parametrize("body", CHEAP)
async def test_a_cheap_body_is_parsed_as_a_short_one(body: bytes) -> None:
    assert await parsed(body) == CHAT.parse(body)
    assert await parsed(bytearray(body)) == CHAT.parse(body)


async def test_a_body_that_begins_as_another_costs_what_it_costs_alone() -> None:
    """Pieces that were counted before are not counted again, and a costly end is noticed behind them."""
    bodies, text = LargeBodies(), "".join(map(str, range(_COUNT_BYTES))).encode()
    begin = b'{"model": "m", "messages": [], "text": "' + text
    cheap, costly = begin + b'"}', begin + b'", "prompt": [' + b"[]," * 20_000 + b"[]]}"
    for body in (cheap, costly, cheap, costly):
        alone = await LargeBodies()._seconds_by_count(body, "a")
        assert await bodies._seconds_by_count(body, "a") == pytest.approx(alone)
    counted = len(bodies._counted)
    assert await bodies._seconds_by_count(cheap, "a") < PARSE_SECONDS_MAX < await bodies._seconds_by_count(costly, "a")
    assert len(bodies._counted) == counted

    await bodies._seconds_by_count(cheap, "b")  # what another tenant has sent is new
    alone = LargeBodies()
    await alone._seconds_by_count(cheap, "b")
    assert len(bodies._counted) == counted + len(alone._counted)


async def test_of_a_piece_that_was_counted_before_only_the_part_that_differs_is_counted_again() -> None:
    bodies, body = LargeBodies(), bytearray("".join(map(str, range(_COUNT_BYTES))).encode())
    await bodies._seconds_by_count(body, "a")
    counted = len(bodies._counted)

    body[_COUNT_BYTES + 7 : _COUNT_BYTES + 8] = b"["

    costs = await LargeBodies()._seconds_by_count(body, "a")
    assert await bodies._seconds_by_count(body, "a") == pytest.approx(costs)
    assert len(bodies._counted) == counted + 2, "the piece, and its part"


async def test_of_a_costly_body_all_but_the_prompt_is_parsed() -> None:
    messages = [{"role": "user", "content": "x" * 40}] * 30_000
    body = encoded(model="m", stream=True, cache_salt="s", messages=messages, extra=[[]] * 1000, model2="n")

    found = await parsed(body)

    assert (found.model, found.stream, found.names_salt) == ("m", True, True)
    assert isinstance(found.prompt, RawPrompt)
    assert found.prompt.cache_salt == "s"
    assert found.prompt.text == body[body.index(b"[") :][:TEXT_BYTES_MAX]
    assert 30_000 * 10 <= found.prompt.prompt_tokens <= 30_000 * 20


async def test_a_costly_member_that_is_not_read_costs_nothing() -> None:
    body = encoded(model="m", messages=[{"role": "user", "content": "hi"}], extra=[[]] * 100_000)

    assert await parsed(body) == CHAT.parse(body)


@pytest.mark.parametrize(
    ("name", "path"),
    [("prompt", "/v1/completions"), ("token_ids", "/inference/v1/generate"), ("input", "/v1/embeddings")],
)
async def test_token_ids_are_read_whole(name: str, path: str) -> None:
    ids = list(range(100_000, 300_000))
    for separators in ((",", ":"), (" ,\n", ": ")):
        body = json.dumps({"model": "m", name: ids}, separators=separators).encode()
        found = await parsed(body, route(path))
        assert isinstance(found.prompt, CompletionPrompt)
        assert found.prompt.prompt == array("I", ids)


@pytest.mark.parametrize("odd", [1.5, -1, 2**32, True, None])
async def test_ids_that_are_none_still_count(odd: object) -> None:
    found = await parsed(encoded(model="m", prompt=[*range(200_000), odd]), COMPLETION)

    assert isinstance(found.prompt, RawPrompt)
    assert found.prompt.prompt_tokens == 200_001


async def test_several_prompts_of_ids_count_together() -> None:
    found = await parsed(encoded(model="m", prompt=[list(range(1_000))] * 300), COMPLETION)

    assert isinstance(found.prompt, RawPrompt)
    assert found.prompt.prompt_tokens == 300_000


async def test_too_many_values_and_no_json_are_refused() -> None:
    with pytest.raises(RequestTooLarge, match=f"more than {VALUES_MAX} JSON values"):
        await parsed(b'{"messages":[' + b"[]," * VALUES_MAX + b"[]]}")
    for body in (b'{"messages":[' + b"[]," * 100_000, b"[" + b"[]," * 100_000 + b"1]"):
        with pytest.raises(ClientBadRequest, match="not a JSON object"):
            await parsed(body)
    with pytest.raises(RecursionError):
        await parsed(b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


@pytest.mark.parametrize("old", [b"", b'"cache_salt":"a",', b'"cache_salt":[1],"cache\\u005fsalt":{},'])
async def test_texts_are_set_as_in_short_bodies(old: bytes) -> None:
    body = b' {"model":"alias",' + old + b'"messages":[],"extra":"' + b"x" * 3_000_000 + b'"}'
    replaced = {"model": "m", **({"cache_salt": "s"} if old else {})}

    done = await LargeBodies().set_texts(CHAT, body, replaced, {} if old else {"cache_salt": "s"})

    expected = replace_text(body, "model", "m")
    assert done == (replace_text if old else insert_member)(expected, "cache_salt", "s")


async def test_a_salt_after_many_blanks_is_set() -> None:
    body = b" " * 100_000 + b"{" + b" " * 100_000 + b"}"

    assert json.loads(await LargeBodies().set_texts(CHAT, body, {}, {"cache_salt": "s"})) == {"cache_salt": "s"}


async def test_other_tasks_run_between_steps_and_bodies_take_turns() -> None:
    """Steps are counted: with no time for a second step in an iteration, each lets everything else run once."""
    bodies = LargeBodies(step_seconds=0.0)
    body = b'{"messages":[' + b"[]," * 40_000 + b"[]]}"
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    watching = asyncio.create_task(others())
    order: list[int] = []

    async def read(number: int, data: bytes) -> None:
        await bodies.parse(CHAT, data, TEXT_BYTES_MAX)
        order.append(number)

    await asyncio.gather(read(0, body * 1), read(1, body[:60_000].rstrip(b",") + b"]}"))
    watching.cancel()

    assert turns >= (len(body) + 60_000) // _STEP_BYTES
    assert order == [1, 0]  # the shorter one, which came later, did not wait for the longer one


async def test_a_long_form_is_read_and_changed_as_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    audio = route("/v1/audio/transcriptions")
    field = b'--bound\r\ncontent-disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    sound = b"\r\n--boun" * 300_000
    body = field % (b"file", sound) + field % (b"model", b"alias") + field % (b"stream", b"true") + b"--bound--\r\n"
    for search_bytes in (1_000, 1_013, 1024 * 1024):
        monkeypatch.setattr("spillway_gateway.api.multipart.SEARCH_BYTES", search_bytes)
        found = await parsed(body, audio)
        assert (found.model, found.stream) == ("alias", True)
        done = await LargeBodies().set_texts(audio, body, {"model": "m"}, {})
        assert done == body.replace(b"\r\nalias\r\n", b"\r\nm\r\n") == audio.set_text(body, "model", "m")


async def test_more_ids_than_any_model_takes_only_count() -> None:
    found = await parsed(b'{"model":"m","prompt":[' + b"1," * IDS_MAX + b"1]}", COMPLETION)

    assert isinstance(found.prompt, RawPrompt)
    assert found.prompt.prompt_tokens == IDS_MAX + 1
