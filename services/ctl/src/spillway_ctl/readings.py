"""Asks a gateway and its engines over HTTP for what findings.py judges. Who does not answer is a reading too."""

from __future__ import annotations

import http.client
import json
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from spillway_ctl.evidence import EngineReading, Exposition, GatewayReading, clock_skew
from spillway_settings.wire import CONFIG_PATH, RANK_HEADER

EVENT_SECONDS_MAX = 5.0  # until the gateway has the events of a request
POLL_SECONDS = 0.05
BODY_BYTES_MAX = 32 << 20
WORDS = ("the", "house", "and", "the", "water", "of", "one", "day")  # one token each, in every tokenizer
TEXT = "Once upon a time,  there were 3 tokenizers:\n\tλ, β and 🙂."


@dataclass(frozen=True, slots=True)
class Questions:
    """Keys are empty if none is needed. makes_requests: short completions of each engine and rank."""

    answer_seconds: float
    window_seconds: float
    gateway_key: str = ""
    engine_key: str = ""
    makes_requests: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    skew_seconds: float | None  # the other clock ahead of this one, to a second; None: no date was sent


class NoAnswer(Exception):
    """Why, in words."""


def read_all(
    gateway_url: str | None,
    engine_urls: Sequence[str],
    questions: Questions,
    wait: Callable[[float], None] = time.sleep,
) -> tuple[GatewayReading | None, list[EngineReading]]:
    """engine_urls: the engines to ask; none: those that the gateway names. Takes window_seconds and a few answers."""
    began = time.monotonic()
    gateway = None if gateway_url is None else _begin_gateway(gateway_url, questions)
    known = list(dict.fromkeys((name, url) for _, name, url in gateway.engines())) if gateway is not None else []
    names = {url.rstrip("/"): name for name, url in known}
    urls = engine_urls or [url for _, url in known]
    with ThreadPoolExecutor(max(1, len(urls))) as threads:
        engines = list(threads.map(lambda url: _begin_engine(names.get(url.rstrip("/"), ""), url, questions), urls))
    for engine in engines:
        _request(engine, gateway, questions)
    wait(max(0.0, questions.window_seconds - (time.monotonic() - began)))
    for engine in engines:
        if engine.problem is None:
            engine.after = _page(engine.url, questions.engine_key, questions.answer_seconds)
    if gateway is not None and gateway.problem is None:
        gateway.after = _page(gateway.url, questions.gateway_key, questions.answer_seconds)
    return gateway, engines


def _begin_gateway(url: str, questions: Questions) -> GatewayReading:
    reading = GatewayReading(url.rstrip("/"))
    try:
        answer = ask(f"{reading.url}{CONFIG_PATH}", questions.gateway_key, questions.answer_seconds)
    except NoAnswer as reason:
        reading.problem = str(reason)
        return reading
    reading.config, reading.skew_seconds = _object(answer.body), answer.skew_seconds
    reading.before = _page(reading.url, questions.gateway_key, questions.answer_seconds)
    return reading


def _begin_engine(name: str, url: str, questions: Questions) -> EngineReading:
    reading, seconds = EngineReading(name or url, url.rstrip("/")), questions.answer_seconds
    try:
        answer = ask(f"{reading.url}/health", "", seconds)
    except NoAnswer as reason:
        reading.problem = str(reason)
        return reading
    reading.skew_seconds = answer.skew_seconds
    reading.config = _document(f"{reading.url}{CONFIG_PATH}", questions)
    if not name and isinstance(reading.setting("name"), str):
        reading.name = reading.setting("name")
    vllm = (_document(f"{reading.url}/version", questions) or {}).get("version")
    reading.vllm_version = str(vllm) if vllm else None
    if questions.makes_requests:
        # An engine that was idle reports what happened meanwhile with its next step: it belongs before the window.
        body = {"model": reading.model, "prompt": "a", "max_tokens": 1}
        for rank in range(reading.ranks):
            _document(f"{reading.url}/v1/completions", questions, body, _rank_header(reading, rank))
    reading.before = _page(reading.url, questions.engine_key, seconds)
    text = {"model": reading.model, "prompt": TEXT}
    tokens = (_document(f"{reading.url}/tokenize", questions, text) or {}).get("tokens")
    reading.tokens = tokens if isinstance(tokens, list) else None
    return reading


def _request(engine: EngineReading, gateway: GatewayReading | None, questions: Questions) -> None:
    """One completion that fills two blocks, of each rank: the processes' settings and a KV event follow."""
    if engine.problem is not None:
        return
    if not questions.makes_requests:
        engine.request_problem = "--no-requests"
        return
    block_tokens, longest = engine.setting("blockSize"), engine.setting("model", "maxLength")
    if not isinstance(block_tokens, int) or not isinstance(longest, int):
        engine.request_problem = "the engine does not show its configuration"
        return
    words = min(2 * block_tokens + 16, longest // 2)
    for rank, name in enumerate(engine.routed_names):
        body = {
            "model": engine.model,
            "prompt": " ".join(WORDS[number % len(WORDS)] for number in range(words)),
            "max_tokens": 1,
            "cache_salt": uuid.uuid4().hex,
        }
        header = _rank_header(engine, rank)
        lag = _event_lag(engine, questions, body, header, partial(_batches, gateway, name, questions))
        if lag is not None:
            engine.event_lag_seconds = max(lag, engine.event_lag_seconds or 0.0)


def _event_lag(
    engine: EngineReading,
    questions: Questions,
    body: Mapping[str, Any],
    header: Mapping[str, str],
    applied: Callable[[], float | None],
) -> float | None:
    """Seconds from a request's answer until the gateway has applied more; None: not measured, and why is said."""
    batches = applied()
    try:
        # The first request of an engine may have to compile something.
        ask(f"{engine.url}/v1/completions", questions.engine_key, max(60.0, questions.answer_seconds), body, header)
    except NoAnswer as reason:
        engine.request_problem = str(reason)
        return None
    if batches is None:
        engine.request_problem = "the gateway counts no events of this engine"
        return None
    answered = time.monotonic()
    while (waited := time.monotonic() - answered) < EVENT_SECONDS_MAX:
        now = applied()
        if now is not None and now > batches:
            return waited
        time.sleep(POLL_SECONDS)
    return math.inf


def _batches(gateway: GatewayReading | None, name: str, questions: Questions) -> float | None:
    """KV event batches that the gateway has applied of one engine or rank. name: the gateway's own for it."""
    if gateway is None or gateway.problem is not None:
        return None
    page = _page(gateway.url, questions.gateway_key, questions.answer_seconds)
    if page is None or not page.series("spillway_gateway_events_connected", engine=name):
        return None
    return page.total("spillway_gateway_event_batches_total", engine=name) or 0.0


def _page(url: str, key: str, answer_seconds: float) -> Exposition | None:
    try:
        return Exposition(ask(f"{url}/metrics", key, answer_seconds).body.decode(errors="replace"))
    except NoAnswer:
        return None


def _rank_header(engine: EngineReading, rank: int) -> dict[str, str]:
    return {RANK_HEADER: str(rank)} if engine.ranks > 1 else {}


def _document(
    url: str, questions: Questions, body: Mapping[str, Any] | None = None, more: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    try:
        return _object(ask(url, questions.engine_key, questions.answer_seconds, body, more).body)
    except NoAnswer:
        return None


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(body)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def ask(
    url: str,
    key: str,
    answer_seconds: float,
    body: Mapping[str, Any] | None = None,
    more: Mapping[str, str] | None = None,
) -> Answer:
    """GET, or POST if there is a body; `more` are headers.

    Raises NoAnswer: the address, and why there is none of status 200.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = (
        {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {}) | dict(more or {})
    )
    sent = time.time()
    connection: http.client.HTTPConnection | None = None
    try:
        connection = kind(parts.hostname or "", parts.port, timeout=answer_seconds)
        data = None if body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", parts.path, data, headers)
        reply = connection.getresponse()
        content = reply.read(BODY_BYTES_MAX)
    except TimeoutError:
        raise NoAnswer(f"{url}: no answer within {answer_seconds:g} s") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoAnswer(f"{url}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        if connection is not None:
            connection.close()
    if reply.status in (401, 403):
        raise NoAnswer(f"{url} answered {reply.status}: give an operator's key (--gateway-key-env, --engine-key-env)")
    if reply.status != 200:
        raise NoAnswer(f"{url} answered {reply.status}: {content[:200].decode(errors='replace')}")
    return Answer(content, clock_skew(reply.getheader("date"), sent, time.time()))
