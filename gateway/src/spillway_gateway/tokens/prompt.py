"""Turns a parsed body into the blocks that routing hashes: by the model's tokens if possible, by text otherwise."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import msgspec

from spillway_gateway.config.settings import LimitsConfig
from spillway_gateway.routing.hot_prefixes import HotPrefixes
from spillway_gateway.routing.prefix import (
    TOKEN_BYTES,
    KeyChains,
    PromptBlocks,
    PromptTokens,
    namespace_key,
    short_prompt_key,
    token_bytes,
)
from spillway_gateway.tokens.chat_template import CannotRender
from spillway_gateway.tokens.estimates import holds_media, text_tokens, value_tokens
from spillway_gateway.tokens.fair_threads import FairThreads
from spillway_gateway.tokens.text_blocks import BYTES_PER_TOKEN, TEXT_NAMESPACE_MARK, chat_text, completion_text
from spillway_gateway.tokens.tokenizer import INLINE_CHARS_MAX, Encoded, PromptTokenizer, TokenizerUnusable

_encode = msgspec.json.encode
logger = logging.getLogger(__name__)

# Prompts of more than this are rendered and looked up on a thread, cached or not. A chat of 220,000 characters takes
# 0.1 ms if it was seen before, and a thread's turn under the interpreter's lock takes longer. INLINE_CHARS_MAX bounds
# what costs more than its length: tools, calls, and text of special tokens alone (1 ms).
LONG_INLINE_CHARS_MAX = 512 * 1024
INLINE_ITEMS_MAX = 256  # messages, tools and calls of tools
TOKENIZE_SECONDS_MAX = 2.0  # then the tokens so far are used; waiting longer would cost more than a match saves
WAIT_SECONDS_MAX = 2.5  # then the request is matched by text: its job was not scheduled in time


class ChatPrompt(msgspec.Struct, frozen=True, gc=False):  # parsed JSON holds no cycles
    """The fields of a chat body that its prompt depends on. exact: False when one cannot be reproduced here."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    variables: Mapping[str, Any] = msgspec.field(default_factory=dict)
    cache_salt: str | None = None
    exact: bool = True


class CompletionPrompt(msgspec.Struct, frozen=True, gc=False):
    """prompt: text, or token ids from the client; the first one of a batch."""

    prompt: str | array[int]
    add_special_tokens: bool = True
    cache_salt: str | None = None


class RawPrompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt too costly to parse: the bytes of its JSON, or the start of them, and its estimated tokens."""

    text: bytes
    prompt_tokens: int
    cache_salt: str | None = None


Prompt = ChatPrompt | CompletionPrompt | RawPrompt


class BlockSizes(Protocol):
    """The block sizes of a model's engines, in tokens; fleet.prefix_index.PrefixIndex has them."""

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The sizes of blocks, at least one; that of most engines comes first."""


class PromptReader:
    """Turns the prompts of one model's parsed bodies into keys of blocks, on the event loop; long prompts on threads.

    Args:
        tokenizer: Owned by the reader. A new configuration, or an engine that disagrees with it, replaces it.
        threads: Shared; the application closes them.
        tokens_max: Returns the longest prompt that the model's engines take, if that is known.
        keeps_tokens: Returns whether a prompt that is read now may have to wait, so that an engine is sent its tokens.
        counts_prefixes: Returns whether new engines are sent the beginnings that prompts share, which are in `hot`.
    """

    def __init__(
        self,
        model: str,
        engines: BlockSizes,
        tokenizer: PromptTokenizer | None,
        threads: FairThreads,
        limits: Callable[[], LimitsConfig],
        *,
        tokens_max: Callable[[], int | None] = lambda: None,
        keeps_tokens: Callable[[], bool] = lambda: False,
        counts_prefixes: Callable[[], bool] = lambda: False,
    ) -> None:
        self._model = model
        self._namespace = namespace_key(model)  # of prompts without adapter and salt
        self._chains = KeyChains()
        self._engines = engines
        self.tokenizer = tokenizer
        self._threads = threads
        self._tokens_max = tokens_max
        self._keeps_tokens = keeps_tokens
        self._counts_prefixes = counts_prefixes
        self.hot = HotPrefixes()
        self._limits = limits

    def use(self, tokenizer: PromptTokenizer | None) -> None:
        """Tokenise with this tokenizer from now on; None: match prompts by text."""
        self.tokenizer = tokenizer

    async def read(self, prompt: Prompt, tenant: str = "", *, adapter: str | None = None) -> PromptBlocks:
        """Return the keys of the prompt's blocks, by its tokens, or by its text if it cannot be tokenised.

        Args:
            tenant: Schedules the threads fairly, and separates the cached texts.
            adapter: The LoRA adapter that the prompt is for.

        Raises:
            RecursionError: The prompt is nested too deeply.
        """
        namespace = self._namespace
        if adapter is not None or prompt.cache_salt is not None:
            namespace = namespace_key(self._model, adapter, prompt.cache_salt)
        if isinstance(prompt, RawPrompt):
            blocks = self._of_text(namespace, prompt.text)
            return msgspec.structs.replace(blocks, prompt_tokens=prompt.prompt_tokens, text_tokens=0)
        if isinstance(prompt, CompletionPrompt) and not isinstance(prompt.prompt, str):
            return self._of_tokens(namespace, token_bytes(prompt.prompt), prompt.cache_salt, adapter)
        tokenizer = self.tokenizer
        if tokenizer is not None and (
            isinstance(prompt, CompletionPrompt) or (tokenizer.template is not None and prompt.exact)
        ):
            try:
                text = render(tokenizer, prompt) if _is_small(prompt) else None
                if text is not None:
                    ids = tokenizer.encode_inline(
                        text,
                        add_special_tokens=prompt.add_special_tokens,
                        new_chars_max=tokenizer.inline_chars_max,
                        owner=tenant,
                        on_loop=True,
                    )
                    if ids is not None:
                        return self._of_tokens(namespace, ids, prompt.cache_salt, adapter)
                async with asyncio.timeout(WAIT_SECONDS_MAX):
                    encoded = await self._threads.run(tenant, self._in_steps(tokenizer, prompt, text, tenant))
                return msgspec.structs.replace(
                    self._of_tokens(namespace, encoded.ids, prompt.cache_salt, adapter),
                    prompt_tokens=max(1, encoded.tokens),
                )
            except (CannotRender, UnicodeEncodeError, OverflowError):
                pass
            except TimeoutError:
                logger.warning("model %s: a prompt was not tokenised within %g s", self._model, WAIT_SECONDS_MAX)
        blocks = self._of_text(namespace, self._text(prompt))
        with_media = isinstance(prompt, ChatPrompt) and holds_media(prompt.messages)
        text_tokens = 0 if with_media else blocks.text_tokens
        return msgspec.structs.replace(blocks, prompt_tokens=max(1, _estimate(prompt)), text_tokens=text_tokens)

    def _in_steps(
        self, tokenizer: PromptTokenizer, prompt: ChatPrompt | CompletionPrompt, rendered: str | None, tenant: str
    ) -> Generator[None, None, Encoded]:
        until = monotonic() + TOKENIZE_SECONDS_MAX
        tokens_max = self._tokens_max()

        def steps() -> Generator[None, None, Encoded]:
            text = render(tokenizer, prompt) if rendered is None else rendered
            return (
                yield from tokenizer.encode_in_steps(
                    text,
                    add_special_tokens=prompt.add_special_tokens,
                    owner=tenant,
                    tokens_max=tokens_max,
                    late=lambda: monotonic() >= until,
                )
            )

        return steps()

    def _of_tokens(
        self, namespace: int, data: bytes, cache_salt: str | None, adapter: str | None = None
    ) -> PromptBlocks:
        """Return the keys of token ids. Those beyond any engine's longest prompt are not hashed: it will be refused.

        Args:
            data: Token ids as token_bytes() gives them.
        """
        prompt_tokens = max(1, len(data) // TOKEN_BYTES)
        tokens_max = self._tokens_max()
        if tokens_max is not None:
            data = data[: tokens_max * TOKEN_BYTES]
        block_tokens, *others = self._engines.block_sizes
        chains = self._chains
        keys = chains.keys(namespace, data, block_tokens * TOKEN_BYTES)
        spread_key = keys[0] if keys else short_prompt_key(namespace, data)
        other_keys = {size: chains.keys(namespace, data, size * TOKEN_BYTES) for size in others}
        if keys and adapter is None and self._counts_prefixes():  # engines take no hints about adapters' blocks
            now = monotonic()
            if counts := self.hot.counts_for(now):
                # Once the request has been sent: it is counted for the sake of later ones.
                block_bytes = block_tokens * TOKEN_BYTES
                count = partial(self.hot.requested, keys, data, block_bytes, cache_salt, now, count=counts)
                asyncio.get_running_loop().call_soon(count)
        tokens = PromptTokens(bytes(data), cache_salt) if self._keeps_tokens() else None
        return PromptBlocks(keys, block_tokens, prompt_tokens, spread_key, other_keys, tokens)

    def _of_text(self, namespace: int, text: bytes) -> PromptBlocks:
        namespace ^= TEXT_NAMESPACE_MARK
        block_tokens = self._engines.block_sizes[0]
        prompt_tokens = max(1, len(text) // BYTES_PER_TOKEN)
        keys = self._chains.keys(namespace, text, block_tokens * BYTES_PER_TOKEN)
        spread_key = keys[0] if keys else short_prompt_key(namespace, text)
        whole = len(text) < self._limits().text_chars_max
        return PromptBlocks(keys, block_tokens, prompt_tokens, spread_key, text_tokens=prompt_tokens if whole else 0)

    def _text(self, prompt: ChatPrompt | CompletionPrompt) -> bytes:
        if isinstance(prompt, ChatPrompt):
            return chat_text(prompt.messages, prompt.tools, self._limits().text_chars_max)
        assert isinstance(prompt.prompt, str)
        return completion_text(prompt.prompt, self._limits().text_chars_max)


def load_tokenizer(model: str, folder: str | None) -> PromptTokenizer | None:
    """The configured tokenizer, or None with an error in the log: prompts are then matched by text blocks."""
    if folder is None:
        return None
    try:
        return PromptTokenizer.load(Path(folder))
    except (TokenizerUnusable, OSError) as error:
        logger.error("model %s: tokenizer unusable, prompts are matched by text blocks: %s", model, error)
        return None


def render(tokenizer: PromptTokenizer, prompt: ChatPrompt | CompletionPrompt) -> str:
    """The prompt text, through the chat template for a chat. Raises CannotRender."""
    if isinstance(prompt, CompletionPrompt):
        assert isinstance(prompt.prompt, str)
        return prompt.prompt
    assert tokenizer.template is not None
    return tokenizer.template.render(
        prompt.messages,
        tools=prompt.tools,
        add_generation_prompt=prompt.add_generation_prompt,
        variables=prompt.variables,
    )


def render_and_encode(tokenizer: PromptTokenizer, prompt: ChatPrompt | CompletionPrompt) -> array[int]:
    """Return the token ids of a prompt of any length. Raises CannotRender."""
    return tokenizer.encode(render(tokenizer, prompt), add_special_tokens=prompt.add_special_tokens)


def _estimate(prompt: ChatPrompt | CompletionPrompt) -> int:
    if isinstance(prompt, CompletionPrompt):
        assert isinstance(prompt.prompt, str)
        return text_tokens(prompt.prompt)
    return value_tokens(prompt.messages) + value_tokens(prompt.tools)


def _is_small(prompt: ChatPrompt | CompletionPrompt) -> bool:
    """Whether the prompt may be rendered and looked up on the event loop."""
    if isinstance(prompt, CompletionPrompt):
        return len(prompt.prompt) <= LONG_INLINE_CHARS_MAX
    items, chars = len(prompt.messages) + len(prompt.tools or ()), 0
    beside: list[Any] = [prompt.tools, prompt.variables] if prompt.tools or prompt.variables else []
    for message in prompt.messages[:INLINE_ITEMS_MAX]:
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str) and isinstance(role, str) and len(message) == 2:  # most messages
            chars += len(role) + len(content)
            continue
        for name, value in message.items():
            if isinstance(value, str):
                chars += len(value)
                continue
            if isinstance(value, list):
                items += len(value)
                if name == "content":
                    texts = [part["text"] for part in value if _is_text(part)]
                    chars += sum(map(len, texts))
                    if len(texts) == len(value):
                        continue
            beside.append(value)
    if items > INLINE_ITEMS_MAX or chars > LONG_INLINE_CHARS_MAX:
        return False
    return not beside or len(_encode(beside)) <= INLINE_CHARS_MAX


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.keys() == _TEXT_PART and isinstance(part["text"], str)


_TEXT_PART = {"type", "text"}
