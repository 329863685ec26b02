"""A prompt that one engine computes and another one answers: over real HTTP, with engines that fail in either leg."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.routing.prefix import PromptBlocks
from spillway_gateway.testing.fake_engine import FakeEngine, Scripted, Seen
from spillway_gateway.testing.faults import DieInStream, Fault, Hang, HeadThenDie, HoldInStream, Status
from spillway_gateway.testing.kv_publisher import KvPublisher
from spillway_gateway.testing.running import RunningGateway, gateway_config, running_gateway, until
from spillway_gateway.testing.running_fronts import running_fronts
from spillway_gateway.upstream import first_leg as leg_bodies
from spillway_gateway.upstream import relay
from spillway_gateway.upstream.first_leg import first_leg_body, place_of, second_leg
from spillway_gateway.upstream.outbound import OutboundRequest
from spillway_settings.wire import HAND_OVER_MEMBER, PROMOTE_PATH

BLOCK, STORE = 16, "nvme/0123456789abcdef"
PROMPT = list(range(1000, 1000 + 6 * BLOCK + 5))
ALWAYS = {"mode": "always", "uncachedTokensMin": 32}
LONG_WAIT = {"handOverSecondsMax": 120}


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


async def start(start_engine: Any, roles: dict[str, str], stores: dict[str, str] | None = None) -> list[FakeEngine]:
    engines = []
    for name in roles:
        engine = await start_engine(name, block_tokens=BLOCK, publisher=KvPublisher())
        engine.store = (stores or {}).get(name, STORE)
        engine.prefill(list(range(BLOCK)))  # tells the gateway how long its blocks are
        engine.announce_stored(engine.store)
        engines.append(engine)
    return engines


def config_of(engines: list[FakeEngine], roles: dict[str, str], **disaggregation: Any) -> dict[str, Any]:
    document = gateway_config(engines, disaggregation={**ALWAYS, **LONG_WAIT, **disaggregation})
    for entry in document["models"][0]["engines"]:
        entry["role"] = roles[entry["name"]]
    return document


@asynccontextmanager
async def split(
    start_engine: Any, *decode: str, stores: dict[str, str] | None = None, **disaggregation: Any
) -> AsyncIterator[tuple[RunningGateway, FakeEngine, list[FakeEngine]]]:
    """(gateway, prefill engine, decode engines) with a common store, unless stores say otherwise."""
    roles = {"p": "prefill", **dict.fromkeys(decode or ("d",), "decode")}
    engines = await start(start_engine, roles, stores)
    async with running_gateway(config_of(engines, roles, **disaggregation)) as running:
        index = running.gateway.fleets[0].index
        await until(lambda: all(index.stores_of(name) for name in roles) and index.block_sizes == (BLOCK,))
        yield running, engines[0], engines[1:]


async def ask(client: aiohttp.ClientSession, url: str, **fields: Any) -> tuple[int, str, bytes]:
    body = {"model": "fake", "prompt": PROMPT, **fields}
    async with client.post(url + "/v1/completions", json=body) as reply:
        return reply.status, reply.headers.get("x-spillway-engine", ""), await reply.read()


def prompts(engine: FakeEngine) -> list[dict[str, Any]]:
    return [json.loads(seen.body) for seen in engine.seen if seen.path != PROMOTE_PATH]


def legs(running: RunningGateway) -> dict[tuple[str, str], float]:
    counted = {}
    for line in running.gateway.metrics.exposition().decode().splitlines():
        if line.startswith("spillway_gateway_legs_total{"):
            labels = dict(pair.split("=") for pair in line.partition("{")[2].partition("}")[0].split(","))
            counted[labels["decision"].strip('"'), labels["reason"].strip('"')] = float(line.rpartition(" ")[2])
    return counted


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_is_computed_on_one_engine_and_answered_by_another(start_engine, client, stream):
    async with split(start_engine) as (running, prefill, (decode,)):
        status, engine, answer = await ask(client, running.url, stream=stream, max_tokens=7)

        assert (status, engine) == (200, "d")
        assert all(word.strip() in answer.decode() for word in decode.words_for(PROMPT)), "one engine's own answer"
        (first,), (second,) = prompts(prefill), prompts(decode)
        assert (first["max_tokens"], first["stream"] if stream else False) == (1, False)
        assert first["kv_transfer_params"] == {"spillway_hand_over": True}
        assert second == {"model": "fake", "prompt": PROMPT, "stream": stream, "max_tokens": 7}, "as the client sent it"
        assert legs(running) == {("two", "always"): 1.0}
        assert "spillway_gateway_hand_over_seconds_count" in running.gateway.metrics.exposition().decode()


async def test_a_second_turn_with_a_short_rest_takes_one_leg(start_engine, client):
    async with split(start_engine) as (running, prefill, (decode,)):
        for _ in range(2):
            await ask(client, running.url)
        await until(lambda: legs(running) == {("two", "always"): 1.0, ("one", "short"): 1.0})
        assert (len(prompts(prefill)), len(prompts(decode))) == (1, 2)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Status(503), "prefill_refused"),
        (Status(400), "prefill_refused"),
        (HeadThenDie(), "prefill_failed"),
        (DieInStream(0), "prefill_failed"),
        (Hang(), "prefill_late"),
    ],
)
async def test_whatever_a_prefill_engine_does_the_answer_comes(start_engine, client, fault: Fault, reason: str):
    late = {"prefillSecondsMax": 0.2} if isinstance(fault, Hang) else {}
    async with split(start_engine, **late) as (running, prefill, (decode,)):
        prefill.fault = fault
        status, engine, _ = await ask(client, running.url)

        assert (status, engine) == (200, "d")
        assert len(prompts(decode)) == 1
        assert legs(running) == {("one", reason): 1.0}


async def test_a_first_leg_that_its_engine_aborts_is_a_failure(start_engine, client):
    async with split(start_engine) as (running, prefill, _):
        document = {"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}
        prefill.script = lambda path, body: Scripted(document=document)
        status, engine, _ = await ask(client, running.url)

        assert (status, engine) == (200, "d")
        assert legs(running) == {("one", "prefill_failed"): 1.0}


async def begin_first_leg(client: Any, running: RunningGateway, prefill: FakeEngine) -> tuple[asyncio.Task[Any], Seen]:
    prefill.fault = HoldInStream(0, asyncio.Event())
    asking = asyncio.create_task(ask(client, running.url))
    await until(lambda: prefill.seen)
    return asking, prefill.seen[0]


async def test_a_killed_prefill_engine_costs_no_answer(start_engine, client):
    async with split(start_engine) as (running, prefill, _):
        asking, _ = await begin_first_leg(client, running, prefill)
        await prefill.stop()
        assert (await asking)[:2] == (200, "d")
        assert legs(running) == {("one", "prefill_failed"): 1.0}
        assert (await ask(client, running.url, prompt=PROMPT[5:]))[0] == 200


async def test_a_prefill_engine_that_ends_gives_its_first_legs_up(start_engine, client):
    async with split(start_engine) as (running, prefill, _):
        asking, seen = await begin_first_leg(client, running, prefill)
        running.engine("p").end_requests()
        assert (await asking)[:2] == (200, "d")
        await seen.cancelled.wait()
        assert legs(running) == {("one", "prefill_failed"): 1.0}


async def test_a_client_that_leaves_ends_the_first_leg(start_engine, client):
    async with split(start_engine) as (running, prefill, (decode,)):
        asking, seen = await begin_first_leg(client, running, prefill)
        asking.cancel()
        async with asyncio.timeout(120):
            await seen.cancelled.wait()
        await until(lambda: not any(engine.running_requests for engine in running.gateway.fleets[0].engines.values()))
        assert prompts(decode) == []


async def test_a_decode_engine_that_dies_is_replaced_by_another_one(start_engine, client):
    async with split(start_engine, "d1", "d2") as (running, prefill, decode):
        for engine in decode:
            engine.fault = HoldInStream(0, asyncio.Event())
        asking = asyncio.create_task(ask(client, running.url))
        await until(lambda: any(prompts(engine) for engine in decode))
        first = next(engine for engine in decode if prompts(engine))
        other = next(engine for engine in decode if engine is not first)
        other.fault = None
        first.fault = None
        for connection in list(first.connections):  # the process lives, so that the request is no suspect
            connection.kill()
        assert (await asking)[:2] == (200, other.name)
        assert len(prompts(prefill)) == 1
        assert legs(running) == {("two", "always"): 1.0}


def cut(running: RunningGateway, decode: FakeEngine) -> None:
    for connection in list(decode.connections):  # the process lives, so that the request is no suspect
        connection.kill()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "happens"),
    [
        (HoldInStream(0, asyncio.Event()), cut),
        (HoldInStream(0, asyncio.Event()), lambda running, _: running.engine("d").end_requests()),  # it drains
        (Hang(), lambda running, _: running.engine("d").hung("polls time out")),
        (Status(503), lambda *_: None),
    ],
)
async def test_the_prefill_engine_answers_if_the_only_decode_engine_cannot(
    start_engine, client, fault: Fault, happens: Callable[[RunningGateway, FakeEngine], None], stream: bool
):
    async with split(start_engine) as (running, prefill, (decode,)):
        decode.fault = fault
        asking = asyncio.create_task(ask(client, running.url, stream=stream))
        await until(lambda: prompts(decode))
        happens(running, decode)
        assert (await asking)[:2] == (200, "p")
        assert prompts(prefill)[-1] == {"model": "fake", "prompt": PROMPT, "stream": stream}, "the whole request"
        assert legs(running) == {("two", "always"): 1.0}


@pytest.mark.parametrize("others", [("d2",), ()])
@pytest.mark.parametrize("removed", [False, True])
async def test_a_decode_engine_that_goes_during_the_first_leg_is_not_waited_for(start_engine, client, others, removed):
    """Another one loads the prompt from the common store, or the prefill engine answers; none waits in vain."""
    async with split(start_engine, "d1", *others) as (running, prefill, _):
        fleet, released = running.gateway.fleets[0], asyncio.Event()
        for name in others:
            running.engine(name).busy.add(60.0, time.monotonic())
        prefill.fault = HoldInStream(0, released)
        asking = asyncio.create_task(ask(client, running.url))
        await until(lambda: prompts(prefill))
        if removed:
            fleet.remove_engine("d1")
            for _ in fleet.index.retire_engine("d1"):
                pass
        else:
            running.engine("d1").refused("it died")
        prefill.fault = None
        released.set()
        assert (await asking)[:2] == (200, others[0] if others else "p")


async def test_a_hand_over_that_does_not_come_is_waited_for_in_vain_and_not_for_long(start_engine, client):
    async with split(start_engine, handOverSecondsMax=0.05) as (running, prefill, (decode,)):
        prefill.store = None  # nothing is stored
        assert (await ask(client, running.url))[:2] == (200, "d")
        assert legs(running) == {("two", "always"): 1.0}
        assert len(prompts(decode)) == 1


@pytest.mark.parametrize(
    ("settings", "fields", "reason"),
    [
        ({"mode": "off", "strictRoles": True}, {}, "off"),
        ({"mode": "auto", "strictRoles": True}, {}, "price"),
        ({"uncachedTokensMin": 4096}, {}, "short"),
        ({"stores": {"d": "nvme/fedcba9876543210"}}, {}, "no_common_store"),
        ({}, {"echo": True}, "body"),
        ({}, {"kv_transfer_params": {"do_remote_prefill": True}}, "body"),
        ({}, {"prompt": [PROMPT, PROMPT]}, "body"),
    ],
)
async def test_one_leg_says_why(start_engine, client, settings, fields, reason):
    async with split(start_engine, **settings) as (running, prefill, (decode,)):
        assert (await ask(client, running.url, **fields))[:2] == (200, "d")
        assert (len(prompts(prefill)), len(prompts(decode))) == (0, 1)
        assert legs(running) == {("one", reason): 1.0}


@pytest.mark.parametrize(
    ("mode", "strict", "answers"), [("auto", False, "p"), ("off", False, "p"), ("auto", True, "d")]
)
async def test_beside_a_busy_decode_engine_a_prefill_engine_answers_unless_roles_are_strict(
    start_engine, client, mode, strict, answers
):
    async with split(start_engine, mode=mode, strictRoles=strict, uncachedTokensMin=4096) as (running, _, _):
        running.engine("d").busy.add(60.0, time.monotonic())
        assert (await ask(client, running.url))[:2] == (200, answers)


async def test_other_routes_take_one_leg_and_engines_without_roles_count_none(start_engine, client):
    async with split(start_engine) as (running, prefill, _):
        body = {"model": "fake", "input": "x" * 200}
        async with client.post(running.url + "/v1/responses", json=body) as reply:
            assert reply.status == 200
        assert prompts(prefill) == [] and legs(running) == {("one", "dialect"): 1.0}
    engine = await start_engine("plain")
    async with running_gateway(gateway_config([engine])) as running:
        assert (await ask(client, running.url))[0] == 200
        assert legs(running) == {}


PLACE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p",
    "remote_request_id": "cmpl-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [[3, 4]],
    "tp_size": 1,
}
BY_CONNECTOR = {"handOver": "connector", "stores": {"p": STORE, "d": "nvme/fedcba9876543210"}}  # none in common


def connector(place: dict[str, Any] | None) -> Any:
    """Answers as an engine whose connector keeps the prompt's blocks."""
    document = {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}], "kv_transfer_params": place}
    return lambda path, body: Scripted(document=document)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engines_own_connector_hands_over_without_a_common_store(start_engine, client, stream):
    async with split(start_engine, **BY_CONNECTOR) as (running, prefill, (decode,)):
        prefill.script = connector(PLACE)
        status, engine, answer = await ask(client, running.url, stream=stream, max_tokens=7)

        assert (status, engine) == (200, "d")
        assert all(word.strip() in answer.decode() for word in decode.words_for(PROMPT))
        (first,), (second,) = prompts(prefill), prompts(decode)
        asked = first["kv_transfer_params"]
        assert (first["max_tokens"], asked["do_remote_decode"], asked["do_remote_prefill"]) == (1, True, False)
        assert "spillway_hand_over" not in asked
        body = {"model": "fake", "prompt": PROMPT, "stream": stream, "max_tokens": 7}
        assert second == {**body, "kv_transfer_params": PLACE}
        assert b"remote" not in answer
        assert legs(running) == {("two", "always"): 1.0}
        page = running.gateway.metrics.exposition().decode()
        assert "spillway_gateway_hand_over_seconds_count" not in page, "the transfer is a part of the second leg"
        assert prefill.seen[-1].path != PROMOTE_PATH and all(seen.path != PROMOTE_PATH for seen in decode.seen)


async def test_a_place_is_named_once(start_engine, client):
    """An engine that fails with it is replaced by one that computes the prompt."""
    async with split(start_engine, "d1", "d2", handOver="connector") as (running, prefill, decode):
        prefill.script = connector(PLACE)
        for engine in decode:
            engine.fault = Status(503)
        asking = asyncio.create_task(ask(client, running.url))
        await until(lambda: any(prompts(engine) for engine in decode))
        await asking
        given = sorted("kv_transfer_params" in body for engine in decode for body in prompts(engine))
        assert given == [False, True]


@pytest.mark.parametrize("fields", [{"n": 2}, {"n": "2"}, {"prompt": [PROMPT, []]}, {"use_beam_search": True, "n": 1}])
async def test_a_request_that_would_read_a_place_more_than_once_or_never_takes_one_leg(start_engine, client, fields):
    """vLLM reads it for each choice; after the first reading other requests' KV may lie there."""
    async with split(start_engine, **BY_CONNECTOR) as (running, prefill, (decode,)):
        prefill.script = connector(PLACE)
        assert (await ask(client, running.url, **fields))[:2] == (200, "d")
        assert prompts(prefill) == [] and "kv_transfer_params" not in prompts(decode)[0]
        assert legs(running) == {("one", "body"): 1.0}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": "seven"},
        {"max_tokens": 100_000},  # with the prompt, more than the engines' max_model_len
        {"max_completion_tokens": -5},
        {"min_tokens": 9, "max_tokens": 8},
        {"min_tokens": -1},
        {"min_tokens": 17},  # completions have 16 tokens if they say no length
        {"n": 0},
        {"stream": "perhaps"},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": "no"}, "stream": True},
        {"logprobs": 21},
        {"logprobs": -2},
        {"top_logprobs": 5},
        {"return_token_ids": []},
    ],
)
async def test_what_an_engine_may_refuse_of_the_answer_is_not_asked_after_a_first_leg(start_engine, client, fields):
    """The prefill engine would keep the prompt's blocks, which no engine reads, for as long as the connector waits."""
    async with split(start_engine, **BY_CONNECTOR) as (running, prefill, _):
        prefill.script = connector(PLACE)
        await ask(client, running.url, **fields)
        assert prompts(prefill) == []


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 7, "min_tokens": 7, "n": 1, "logprobs": 20, "stream": False},
        {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": None, "logprobs": None},
        {"logprobs": True, "top_logprobs": 5, "max_completion_tokens": 3, "return_token_ids": False},
    ],
)
async def test_an_answer_that_every_engine_gives_takes_two_legs_by_connector(start_engine, client, fields):
    async with split(start_engine, **BY_CONNECTOR) as (running, prefill, (decode,)):
        prefill.script = connector(PLACE)
        assert (await ask(client, running.url, **fields))[0] == 200
        assert (len(prompts(prefill)), len(prompts(decode))) == (1, 1)


async def test_a_place_is_not_named_again_when_a_reused_connection_ends(start_engine, client):
    """The engine, or one of several servers of it, may have received the request and read the place."""
    async with split(start_engine, **BY_CONNECTOR) as (running, prefill, (decode,)):
        prefill.script = connector(PLACE)
        assert (await ask(client, running.url))[:2] == (200, "d")
        decode.fault = HoldInStream(0, asyncio.Event())
        asking = asyncio.create_task(ask(client, running.url, prompt=PROMPT[5:]))
        await until(lambda: len(prompts(decode)) == 2)
        decode.fault = None
        for connection in list(decode.connections):
            connection.kill()
        assert (await asking)[:2] == (200, "d")
        given = ["kv_transfer_params" in body for body in prompts(decode)]
        assert given == [True, True, False]
        assert len(prompts(prefill)) == 2


@pytest.mark.parametrize(
    ("roles", "gone", "answers"),
    [
        ({"p": "prefill", "d": "decode"}, "d", "p"),
        ({"p": "prefill", "q": "prefill", "d": "decode"}, "d", None),  # either
        ({"p": "both", "d": "decode"}, "d", "p"),
    ],
)
async def test_no_engine_is_sent_to_its_own_blocks_nor_a_prefill_engine_to_any(
    start_engine, client, roles, gone, answers
):
    """A decode engine goes during the first leg. What then answers has the prompt, or computes it."""
    engines = {engine.name: engine for engine in await start(start_engine, roles)}
    firsts = [engine for name, engine in engines.items() if name != gone]
    async with running_gateway(config_of([*engines.values()], roles, handOver="connector")) as running:
        index, released = running.gateway.fleets[0].index, asyncio.Event()
        await until(lambda: index.block_sizes == (BLOCK,))
        for engine in firsts:
            engine.fault = HoldInStream(0, released)
            engine.script = connector(PLACE)
        asking = asyncio.create_task(ask(client, running.url))
        await until(lambda: any(prompts(engine) for engine in firsts))
        running.engine(gone).refused("it died")
        for engine in firsts:
            engine.fault = None
        released.set()
        status, engine_name, _ = await asking
        assert status == 200 and engine_name == (answers or engine_name)
        first, last = [body for engine in firsts for body in prompts(engine)]
        assert {"do_remote_decode" in body.get("kv_transfer_params", {}) for body in (first, last)} == {True, False}
        assert not any(body.get("kv_transfer_params", {}).get("do_remote_prefill") for body in (first, last))


async def test_a_place_that_may_hold_others_kv_by_now_is_not_named(start_engine, client, monkeypatch):
    """Engines keep blocks for a while; the second leg may have waited for its engine for longer."""
    monkeypatch.setattr(relay, "PLACE_SECONDS_MAX", 0.0)
    async with split(start_engine, **BY_CONNECTOR) as (running, prefill, (decode,)):
        prefill.script = connector(PLACE)
        assert (await ask(client, running.url))[:2] == (200, "d")
        assert "kv_transfer_params" not in prompts(decode)[0]


@pytest.mark.parametrize(("hand_over", "passes"), [("connector", False), ("store", True)])
async def test_beside_the_gateways_own_no_client_says_how_blocks_are_transferred(
    start_engine, client, hand_over: str, passes: bool
):
    """One that does would end an engine whose connector trusts it. Without a keys file they pass otherwise."""
    async with split(start_engine, handOver=hand_over) as (running, prefill, (decode,)):
        decode.script = connector(PLACE)
        status, _, answer = await ask(client, running.url, kv_transfer_params={**PLACE, "remote_block_ids": []})
        assert (status, prompts(prefill)) == (200, [])
        assert bool(prompts(decode)[0].get("kv_transfer_params")) is passes
        assert (json.loads(answer)["kv_transfer_params"] is not None) is passes


async def test_engines_without_roles_answer_whole_requests_whatever_hands_over(start_engine, client):
    roles = {"p": "both", "d": "both"}
    engines = await start(start_engine, roles)
    async with running_gateway(config_of(engines, roles, handOver="connector", mode="off")) as running:
        assert (await ask(client, running.url))[0] == 200
        (body,) = (body for engine in engines for body in prompts(engine))
        assert "kv_transfer_params" not in body and legs(running) == {}


@pytest.mark.parametrize("place", [None, {}, {**PLACE, "remote_block_ids": []}])
async def test_a_first_leg_that_names_no_place_leaves_the_whole_request(start_engine, client, place):
    async with split(start_engine, **BY_CONNECTOR) as (running, prefill, (decode,)):
        prefill.script = connector(place)
        assert (await ask(client, running.url))[:2] == (200, "d")
        assert "kv_transfer_params" not in prompts(decode)[0]
        assert legs(running) == {("one", "no_transfer"): 1.0}


async def test_several_processes_hand_over_as_one_does(start_engine, client):
    roles = {"p": "prefill", "d": "decode"}
    engines = await start(start_engine, roles)
    async with running_fronts(config_of(engines, roles)) as fronts:
        index = fronts.gateway.fleets[0].index
        await until(lambda: all(index.stores_of(name) for name in roles))
        await until(lambda: all(front.reported_sizes() == (BLOCK,) for front in fronts.started))
        assert (await ask(client, fronts.urls[0]))[:2] == (200, "d")
        assert [len(prompts(engine)) for engine in engines] == [1, 1]
        engines[0].fault = HeadThenDie()
        assert (await ask(client, fronts.urls[1], prompt=PROMPT[5:]))[:2] == (200, "d")


async def test_several_processes_hand_over_by_connector(start_engine, client):
    roles = {"p": "prefill", "d": "decode"}
    engines = await start(start_engine, roles, BY_CONNECTOR["stores"])
    engines[0].script = connector(PLACE)
    async with running_fronts(config_of(engines, roles, handOver="connector")) as fronts:
        index = fronts.gateway.fleets[0].index
        await until(lambda: all(index.stores_of(name) for name in roles))
        await until(lambda: all(front.reported_sizes() == (BLOCK,) for front in fronts.started))
        assert (await ask(client, fronts.urls[0]))[:2] == (200, "d")
        assert prompts(engines[1])[0]["kv_transfer_params"] == PLACE


VALUES = st.none() | st.booleans() | st.integers(-3, 9) | st.text(max_size=3) | st.lists(st.integers(0, 3), max_size=2)
NAMES = st.sampled_from(["prompt", "max_tokens", "max_completion_tokens", "stream", "stream_options", "n", "stop", "x"])


async def test_other_work_passes_while_a_dense_body_is_searched(monkeypatch: pytest.MonkeyPatch):
    """Each of its short members takes the interpreter as long as a kilobyte of text."""
    monkeypatch.setattr(leg_bodies, "perf_counter", iter(range(1_000_000)).__next__, raising=False)  # a slow clock
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    body = b"{%s}" % b",".join([b'"\\u0061":0'] * 6000)
    beside = asyncio.create_task(other())
    assert json.loads(await first_leg_body(body)) == {
        "a": 0, "max_tokens": 1, "kv_transfer_params": {HAND_OVER_MEMBER: True}
    }  # fmt: skip
    beside.cancel()
    assert turns >= len(body) // (4 * 1024)


@given(st.dictionaries(NAMES, VALUES))
def test_a_first_leg_asks_for_one_token_of_the_same_prompt(body: dict[str, Any]) -> None:
    sent = {**body, "kv_transfer_params": {"spillway_session": {"id": "a"}, "spillway_retention": {"share": 1}}}
    leg = json.loads(asyncio.run(first_leg_body(json.dumps(sent).encode())))
    same = {"prompt", "stop", "x"}
    assert {name: value for name, value in leg.items() if name in same} == {
        name: value for name, value in body.items() if name in same
    }
    assert leg["max_tokens"] == 1 and leg.keys() - body.keys() <= {"max_tokens", "kv_transfer_params"}
    assert not leg.get("stream") and leg.get("stream_options") is leg.get("max_completion_tokens") is None
    assert leg["kv_transfer_params"] == {"spillway_retention": {"share": 1}, "spillway_hand_over": True}


@given(
    st.dictionaries(NAMES, VALUES, min_size=1),
    st.sampled_from([{}, {"kv_transfer_params": {"spillway_session": {"id": "a"}, "remote_port": 1}}]),
)
def test_a_second_leg_is_the_request_and_the_place(body: dict[str, Any], said: dict[str, Any]) -> None:
    sent = json.dumps({**body, **said}).encode()
    request = OutboundRequest(b"/v1/completions", (), sent, b"id", False, PromptBlocks([], 16, 0, 0), 0.0)
    leg = asyncio.run(second_leg(request, PLACE))
    params = {**said.get("kv_transfer_params", {}), **PLACE}
    assert json.loads(bytes(leg.body)) == {**body, "kv_transfer_params": params}


def replied(place: object) -> bytes:
    return json.dumps({"choices": [], "kv_transfer_params": place}).encode()


def read(reply: bytes) -> dict[str, Any] | None:
    place = place_of(reply)
    return None if place is None else json.loads(msgspec.json.encode(place))


@pytest.mark.parametrize(
    "further",
    [
        {},
        {"remote_block_ids": [3, 4]},  # without KV groups
        {"remote_block_ids": [[], [7]]},  # a group's window lies elsewhere
        {"remote_multi_nodes_meta_mapping": {"0": {"host": "10.0.0.1"}}, "last_token_id": 7},
        {"of_a_later_version": [10**40, None, "\u00e9"]},
    ],
)
def test_a_place_is_read_with_members_that_only_its_connector_knows(further: dict[str, Any]) -> None:
    assert read(replied(PLACE | further)) == PLACE | further


@pytest.mark.parametrize("member", ["spillway_session", "spillway_retention", "spillway_hand_over"])
def test_an_engine_does_not_say_what_the_gateway_says(member: str) -> None:
    assert read(replied(PLACE | {member: {"id": "another tenant's"}})) == PLACE


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: None} for name in PLACE if name.startswith("remote_")),
        {"do_remote_prefill": False},
        {"do_remote_prefill": "true"},
        {"remote_engine_id": ["p"]},  # would be a key of the engine's dictionary
        {"remote_host": "h" * 1025},
        {"remote_port": 0},
        {"remote_port": "5600"},
        {"remote_block_ids": []},  # vLLM asserts that there are some
        {"remote_block_ids": [[], []]},
        {"remote_block_ids": [[-1]]},
        {"remote_block_ids": [[[3]]]},
        {"remote_block_ids": [2**31]},
        {"remote_block_ids": {"0": 3}},
    ],
)
def test_a_place_that_would_end_or_block_an_engine_is_none(wrong: dict[str, Any]) -> None:
    assert read(replied(PLACE | wrong)) is None


@pytest.mark.parametrize("name", [name for name in PLACE if name.startswith(("remote_", "do_remote_prefill"))])
def test_a_place_without_what_engines_need_is_none(name: str) -> None:
    assert read(replied({key: value for key, value in PLACE.items() if key != name})) is None


@pytest.mark.parametrize(
    "reply",
    [
        b'{"kv_transfer_params":null}',
        b'{"kv_transfer_params":[1]}',
        b"[]",
        b"{",
        replied(PLACE)[:-2] + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
        replied(PLACE)[:-2] + b',"x":"\xff"}}',
    ],
)
def test_any_reply_is_read(reply: bytes) -> None:
    assert place_of(reply) is None
