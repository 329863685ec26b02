"""The model's own tokenizer: text to token ids as the engine makes them, and remembered where prompts repeat.

A conversation grows at its end, so most of a prompt was tokenised a turn ago. Text between special tokens is tokenised
independently of the rest by nearly all tokenizers; where that is so (checked at load) each such segment is kept by
its hash, and a growing conversation costs only its new messages.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from spillway_gateway.routing.prefix import token_bytes
from spillway_gateway.tokens.chat_template import CannotRender, ChatTemplate
from spillway_gateway.tokens.segment_cache import SegmentCache, segment_key
from spillway_gateway.tokens.word_memo import WordMemo

# Texts are tokenised one at a time, so the library's own pool of threads would only add a way there and back.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MEMO_CHARS_MAX = 1_024  # of longer texts the library's own pass, which leaves the interpreter to others, is better
SEGMENT_CACHE_BYTES = 64 * 1024 * 1024
_PROBES = (
    "Hello, world! 12345  two  spaces\n\nnew paragraph\ttab",
    " leading blank and trailing blank ",
    "Größe, 東京, emoji 🙂 and `code(x=1)`\n",
    "",
)


class TokenizerUnusable(Exception):
    """The folder holds no usable tokenizer; the message says what is missing."""


class PromptTokenizer:
    """Tokenizer and chat template of one model folder. encode() releases the interpreter lock while it works."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.template = template
        self._splitter = _segment_splitter(tokenizer)
        self._segments = SegmentCache(SEGMENT_CACHE_BYTES)
        self._memo = WordMemo.of(tokenizer)
        if self._splitter is not None and not self._segments_agree():
            self._splitter = None

    @classmethod
    def load(cls, folder: Path) -> PromptTokenizer:
        """Raises TokenizerUnusable."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerUnusable(f"{path} does not exist; give a model folder with a tokenizer.json")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerUnusable(f"{path} cannot be read: {error}") from error
        try:
            return cls(tokenizer, _load_template(folder))
        except CannotRender as error:
            raise TokenizerUnusable(f"{folder}: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """Token ids of `text`. Costs about a millisecond per 2,000 characters that were not seen before."""
        data = self.encode_soon(text, add_special_tokens=add_special_tokens, new_chars_max=len(text))
        assert data is not None
        ids = array("I", data)
        if sys.byteorder == "big":
            ids.byteswap()
        return ids

    def encode_soon(self, text: str, *, add_special_tokens: bool, new_chars_max: int) -> bytes | None:
        """As encode(), but as little-endian uint32, and None when more than new_chars_max characters would have to be
        tokenised: cheap enough for the event loop, as handing a few to a thread costs more than they do."""
        if add_special_tokens or self._splitter is None:
            return self._encode(text, add_special_tokens) if len(text) <= new_chars_max else None
        segments = self._splitter(text)
        keys = list(map(segment_key, segments))
        found = self._segments.get_all(keys)
        new = [at for at, ids in enumerate(found) if ids is None]
        if sum(len(segments[at]) for at in new) > new_chars_max:
            return None
        for at in new:
            found[at] = ids = self._encode(segments[at], False)
            self._segments.put(keys[at], ids)
        return b"".join(found)  # type: ignore[arg-type]

    def _encode(self, text: str, add_special_tokens: bool) -> bytes:
        if self._memo is not None and not add_special_tokens and len(text) <= MEMO_CHARS_MAX:
            return self._memo.encode(text)
        # The batch form is the one that releases the lock; "fast" leaves out character offsets.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return token_bytes(encoding.ids)

    def _segments_agree(self) -> bool:
        specials = _special_texts(self._tokenizer)[:3] or [""]
        for special, first, second in itertools.product(specials, _PROBES, _PROBES):
            text = f"{special}{first}{special}{second}\n{special}"
            whole = self._tokenizer.encode(text, add_special_tokens=False).ids
            if list(self.encode(text, add_special_tokens=False)) != whole:
                return False
        return True


def _special_texts(tokenizer: tokenizers.Tokenizer) -> list[str]:
    added = tokenizer.get_added_tokens_decoder().values()
    return [
        token.content
        for token in added
        if token.special and not (token.single_word or token.lstrip or token.rstrip or token.normalized)
    ]


def _segment_splitter(tokenizer: tokenizers.Tokenizer) -> Callable[[str], list[str]] | None:
    """Cuts before each special token."""
    specials = _special_texts(tokenizer)
    if not specials:
        return None
    longest_first = sorted(specials, key=len, reverse=True)
    special = re.compile("|".join(re.escape(text) for text in longest_first))

    def split(text: str) -> list[str]:
        cuts = [0, *[match.start() for match in special.finditer(text)], len(text)]
        return [text[begin:end] for begin, end in itertools.pairwise(cuts) if begin < end]

    return split


def _load_template(folder: Path) -> ChatTemplate | None:
    config: dict[str, Any] = {}
    path = folder / "tokenizer_config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise TokenizerUnusable(f"{path} is not JSON: {error}") from error
    template_file = folder / "chat_template.jinja"
    source = template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, _special_tokens(config))


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for key, value in config.items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[key] = text
    return tokens
