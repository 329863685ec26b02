"""Checks when an engine becomes ready that the gateway tokenises as the engine does.

With a wrong tokenizer or template requests are answered correctly and routed without prefix matches. That must not go
unnoticed: it is an error in the log, a metric at 0, and prompts are matched by text blocks instead.
"""

from __future__ import annotations

import logging
from functools import partial

import aiohttp
import msgspec

from spillway_gateway.background import on_daemon_thread
from spillway_gateway.tokens.chat_template import CannotRender
from spillway_gateway.tokens.prompt import ChatPrompt, CompletionPrompt, render_and_encode
from spillway_gateway.tokens.tokenizer import PromptTokenizer

logger = logging.getLogger(__name__)

ANSWER_SECONDS_MAX = 30.0  # the first call of an engine that has just become ready is slow

PROBE_MESSAGES: tuple[dict[str, str], ...] = (
    {"role": "system", "content": "You answer briefly.\nUse  plain words."},
    {"role": "user", "content": "Größe of 東京 in km²? 🙂 `print(1.50)`"},
    {"role": "assistant", "content": "About 2,194."},
    {"role": "user", "content": " And in square miles?\n"},
)
PROBE_TEXT = "Once upon a time,  there were 3 tokenizers:\n\tλ, β and 🙂."


class Disagreement(Exception):
    """The engine tokenises the same prompt differently."""


async def verify_tokenizer(
    tokenizer: PromptTokenizer, session: aiohttp.ClientSession, *, model: str, engine_name: str, engine_url: str
) -> bool:
    """Compare the ids of two probes with the engine's /tokenize, on the event loop; a thread tokenises the probes.

    Returns:
        True if they agree, False if the engine did not answer. Raises Disagreement.
    """
    answered = False
    if tokenizer.template is not None:
        body: dict[str, object] = {"model": model, "messages": list(PROBE_MESSAGES)}
        try:
            own = await on_daemon_thread(partial(render_and_encode, tokenizer, ChatPrompt(PROBE_MESSAGES)))
        except CannotRender as error:
            logger.warning("engine %s: the chat probe cannot be rendered here: %s", engine_name, error)
        else:
            theirs = await _tokenize(engine_url, session, body)
            answered = theirs is not None
            if theirs is not None and theirs != list(own):
                raise Disagreement(f"chat: {_difference(list(own), theirs)}")
    own = await on_daemon_thread(partial(render_and_encode, tokenizer, CompletionPrompt(PROBE_TEXT)))
    theirs = await _tokenize(engine_url, session, {"model": model, "prompt": PROBE_TEXT})
    if theirs is not None and theirs != list(own):
        raise Disagreement(f"completion: {_difference(list(own), theirs)}")
    return answered or theirs is not None


async def _tokenize(engine_url: str, session: aiohttp.ClientSession, body: dict[str, object]) -> list[int] | None:
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS_MAX)
    url = engine_url.rstrip("/") + "/tokenize"
    headers = {"content-type": "application/json"}
    try:
        async with session.post(url, data=msgspec.json.encode(body), headers=headers, timeout=timeout) as reply:
            if reply.status != 200:
                return None
            document = msgspec.json.decode(await reply.read())
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    tokens = document.get("tokens") if isinstance(document, dict) else None
    return tokens if isinstance(tokens, list) else None


def _difference(own: list[int], theirs: list[int]) -> str:
    same = next((at for at, pair in enumerate(zip(own, theirs, strict=False)) if pair[0] != pair[1]), None)
    at = same if same is not None else min(len(own), len(theirs))
    return f"{len(own)} tokens here, {len(theirs)} there, first difference at position {at}"
