"""Checks at start that the gateway tokenises as the engine does.

A wrong tokenizer or template serves every request correctly and routes all of them blindly, so it has to be loud: an
error in the log, a metric at 0, and matching by text blocks, which at least agrees with itself.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import msgspec

from spillway_gateway.fleet.engines import Engine
from spillway_gateway.tokens.chat_template import CannotRender
from spillway_gateway.tokens.prompt import ChatPrompt, CompletionPrompt, render_and_encode
from spillway_gateway.tokens.tokenizer import PromptTokenizer

logger = logging.getLogger(__name__)

ASK_SECONDS_MAX = 30.0  # an engine that has just become ready is slow once

PROBE_MESSAGES: tuple[dict[str, str], ...] = (
    {"role": "system", "content": "You answer briefly.\nUse  plain words."},
    {"role": "user", "content": "Größe of 東京 in km²? 🙂 `print(1.50)`"},
    {"role": "assistant", "content": "About 2,194."},
    {"role": "user", "content": " And in square miles?\n"},
)
PROBE_TEXT = "Once upon a time,  there were 3 tokenizers:\n\tλ, β and 🙂."


class Disagreement(Exception):
    """The engine makes other tokens of the same prompt."""


async def verify_tokenizer(tokenizer: PromptTokenizer, engine: Engine, session: aiohttp.ClientSession) -> bool:
    """True when the engine agreed, False when it could not be asked. Raises Disagreement."""
    asked = False
    if tokenizer.template is not None:
        body: dict[str, object] = {"model": engine.model, "messages": list(PROBE_MESSAGES)}
        try:
            own = await asyncio.to_thread(render_and_encode, tokenizer, ChatPrompt(PROBE_MESSAGES))
        except CannotRender as error:
            logger.warning("engine %s: the chat probe cannot be rendered here: %s", engine.name, error)
        else:
            theirs = await _tokenize(engine, session, body)
            asked = theirs is not None
            if theirs is not None and theirs != list(own):
                raise Disagreement(f"chat: {_difference(list(own), theirs)}")
    own = await asyncio.to_thread(render_and_encode, tokenizer, CompletionPrompt(PROBE_TEXT))
    theirs = await _tokenize(engine, session, {"model": engine.model, "prompt": PROBE_TEXT})
    if theirs is not None and theirs != list(own):
        raise Disagreement(f"completion: {_difference(list(own), theirs)}")
    return asked or theirs is not None


async def _tokenize(engine: Engine, session: aiohttp.ClientSession, body: dict[str, object]) -> list[int] | None:
    timeout = aiohttp.ClientTimeout(total=ASK_SECONDS_MAX)
    url = engine.config.url.rstrip("/") + "/tokenize"
    headers = {"content-type": "application/json"}
    try:
        async with session.post(url, data=msgspec.json.encode(body), headers=headers, timeout=timeout) as reply:
            if reply.status != 200:
                return None
            document = msgspec.json.decode(await reply.read())
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    tokens = document.get("tokens") if isinstance(document, dict) else None
    return tokens if isinstance(tokens, list) else None


def _difference(own: list[int], theirs: list[int]) -> str:
    same = next((at for at, pair in enumerate(zip(own, theirs, strict=False)) if pair[0] != pair[1]), None)
    at = same if same is not None else min(len(own), len(theirs))
    return f"{len(own)} tokens here, {len(theirs)} there, first difference at position {at}"
