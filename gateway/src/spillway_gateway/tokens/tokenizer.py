"""The model's tokenizer: text to the token ids that the engine uses, with a cache for text that repeats.

A conversation grows at its end, so most of a prompt was tokenised with its previous turn. Nearly all tokenizers treat
text between special tokens independently of the rest. If that holds (checked at load) each such segment is cached by
its hash. Segments that a long text has in common with the turn before it are not even looked up (known_beginnings.py),
so a growing conversation costs only its new messages.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from spillway_gateway.routing.prefix import TOKEN_BYTES
from spillway_gateway.tokens.chat_template import CannotRender, ChatTemplate
from spillway_gateway.tokens.known_beginnings import Beginning, KnownBeginnings
from spillway_gateway.tokens.segment_cache import SegmentCache, segment_key, segment_keys
from spillway_gateway.tokens.text_encoder import TextEncoder

# Texts are tokenised one at a time, so the library's thread pool would only add latency.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SEGMENT_CACHE_BYTES = 64 * 1024 * 1024
BEGINNINGS_BYTES = 64 * 1024 * 1024  # some 150 conversations of 50,000 tokens
_PROBES = (
    "Hello, world! 12345  two  spaces\n\nnew paragraph\ttab",
    " leading blank and trailing blank ",
    "Größe, 東京, emoji 🙂 and `code(x=1)`\n",
    "",
)


INLINE_NEW_CHARS_MAX = 1_024  # of new text: tokenising it takes about as long as handing it to a thread and back
FAST_INLINE_NEW_CHARS_MAX = 16_384  # the same with the fast encoder
INLINE_CHARS_MAX = 32_768  # in which special tokens are searched for on the event loop, however many there are
PATTERN_CHARS_MAX = 4_096  # of a text in which one search by pattern takes less time than many by str.find()
SPECIAL_PLACES_MAX = 1_024  # in a longer text; each takes about 0.4 us
KEPT_SEGMENTS_MIN = 8  # of a beginning: looking up fewer takes no longer than comparing it
STEP_CHARS = 16_384  # of new text in one step of encode_in_steps(), about 8 ms at most
SEARCH_CHARS = 256 * 1024  # in one search for a special token, under the interpreter's lock
CUT_TRIES = 8
CUT_REACH_CHARS = 256
# Places at which most pre-tokenizers split a text: beside a word, after a line.
_cut_places = re.compile(r"(?<=\w)(?=[^\w\n])|(?<=\n)(?=\w)|(?<=[^\w\s])(?=\w)").finditer


class Encoded(NamedTuple):
    """ids: little-endian uint32, of the text or of its beginning. tokens: the count of the whole text, estimated if
    ids are of its beginning."""

    ids: bytes
    tokens: int


class TokenizerUnusable(Exception):
    """The folder holds no usable tokenizer; the message says what is missing."""


class PromptTokenizer:
    """Tokenizer and chat template of one model folder. encode() releases the interpreter lock while it works."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.template = template
        specials = _special_texts(tokenizer)
        self._special = _special_pattern(specials)  # None: texts are not cut before special tokens
        self._special_chars_max = max(map(len, specials), default=0)
        begins = {special[:1] for special in specials}
        self._special_begin = begins.pop() if len(begins) == 1 else ""  # the character with which all begin
        self._segments = SegmentCache(SEGMENT_CACHE_BYTES)
        self._beginnings = KnownBeginnings(BEGINNINGS_BYTES)
        self._encoder = TextEncoder(tokenizer)
        if self._special is not None and not self._segments_agree():
            self._special = None
        self._around = self._special_tokens_around()

    @property
    def inline_chars_max(self) -> int:
        """The characters of new text that are tokenised sooner on the event loop than on a thread."""
        return FAST_INLINE_NEW_CHARS_MAX if self._encoder.fast else INLINE_NEW_CHARS_MAX

    @classmethod
    def load(cls, folder: Path) -> PromptTokenizer:
        """Load the model folder's tokenizer. Raises TokenizerUnusable."""
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
        """Return the token ids of `text`."""
        data = self.encode_inline(text, add_special_tokens=add_special_tokens, new_chars_max=len(text))
        assert data is not None
        ids = array("I", data)
        if sys.byteorder == "big":
            ids.byteswap()
        return ids

    def encode_inline(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        new_chars_max: int,
        owner: str = "",
        on_loop: bool = False,
    ) -> bytes | None:
        """Return encode()'s ids as little-endian uint32; None if more than new_chars_max characters are not cached.

        Used on the event loop if handing the text to a thread would cost more.

        Args:
            owner: The tenant, whose texts are cached apart.
            on_loop: The caller runs on the event loop: then at most INLINE_NEW_CHARS_MAX characters may be slow, and a
                text of more than INLINE_CHARS_MAX may have few beginnings of special tokens.
        """
        if add_special_tokens or self._special is None:
            if self._is_too_long([text], new_chars_max, on_loop):
                return None
            return self._encode(text, add_special_tokens, owner)
        known = self._beginnings.find(owner, text)
        begin, ids_before = (known.end, known.ids) if known is not None else (0, ())
        places = self._special_places(text, begin, any_number=not on_loop or len(text) <= INLINE_CHARS_MAX)
        if places is None:
            return None
        if places and places[0] == begin:
            del places[0]
        cuts = [begin, *places, len(text)] if text else [0]
        keys = segment_keys(owner, text, cuts)
        found = self._segments.get_all(keys)
        new = {at: text[cuts[at] : cuts[at + 1]] for at, ids in enumerate(found) if ids is None}
        if new and self._is_too_long(new.values(), new_chars_max, on_loop):
            return None
        for at, segment in new.items():
            found[at] = ids = self._encode(segment, False, owner)
            self._segments.put(keys[at], ids)
        last = bisect_right(places, len(text) - self._special_chars_max)  # segments before the last place that is kept
        if last >= KEPT_SEGMENTS_MIN or (last and known is not None):
            self._keep_beginning(owner, text, places[last - 1], b"".join(found[:last]), known)  # type: ignore[arg-type]
        return b"".join([*ids_before, *found])  # type: ignore[list-item]  # none is missing now

    def _keep_beginning(self, owner: str, text: str, end: int, ids: bytes, before: Beginning | None = None) -> None:
        """Keep the ids of text[:end], where a special token begins. With the characters that any special token may
        take, all texts that begin alike are cut alike before it. ids: those behind the ids of `before`."""
        self._beginnings.keep(owner, text, end + self._special_chars_max, ids, end=end, before=before)

    def _special_places(self, text: str, begin: int = 0, *, any_number: bool = True) -> list[int] | None:
        """Find where special tokens begin, from `begin` on. Text without their first character is skipped by
        str.find(), which takes a fifteenth of the pattern's time. any_number: if not, return None if that character is
        found at more than SPECIAL_PLACES_MAX."""
        assert self._special is not None
        if len(text) - begin <= PATTERN_CHARS_MAX:
            return [found.start() for found in self._special.finditer(text, begin)]
        first, match = self._special_begin, self._special.match
        places: list[int] = []
        at = text.find(first, begin) if first else begin
        for _ in range(SPECIAL_PLACES_MAX if first else 0):
            if at < 0:
                return places
            found = match(text, at)
            if found is not None:
                places.append(at)
            at = text.find(first, at + 1 if found is None else found.end())
        if at < 0:
            return places
        return [*places, *[found.start() for found in self._special.finditer(text, at)]] if any_number else None

    def _is_too_long(self, texts: Collection[str], chars_max: int, on_loop: bool) -> bool:
        chars = sum(map(len, texts))
        if not on_loop or chars <= INLINE_NEW_CHARS_MAX:
            return chars > chars_max
        return chars > chars_max or not all(map(self._encoder.is_fast_for, texts))

    def encode_in_steps(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        owner: str = "",
        tokens_max: int | None = None,
        late: Callable[[], bool] = lambda: False,
    ) -> Generator[None, None, Encoded]:
        """Encode as encode() does, but yield after each STEP_CHARS of new text. Runs on a tokenizer thread.

        It stops early, with the ids of the text's beginning, above tokens_max (no engine takes such a prompt), if
        late() is true after a step, and if a long text cannot be cut. Raises UnicodeEncodeError for lone surrogates.
        """
        if len(text) <= SEARCH_CHARS:  # most prompts: one step, with all look-ups together
            ids = self.encode_inline(text, add_special_tokens=add_special_tokens, new_chars_max=STEP_CHARS, owner=owner)
            if ids is not None:
                return Encoded(ids, len(ids) // TOKEN_BYTES)
        before, after = self._around if add_special_tokens else (b"", b"")
        parts = [before]
        count, chars, new_chars = len(before) // TOKEN_BYTES, 0, 0
        kept = 0, 1  # the last place of a beginning, and the parts before it
        for segment in self._segments_of(text):
            key = segment_key(owner, segment)
            (known,) = self._segments.get_all([key])
            first, end = len(parts), chars + len(segment)
            if chars + self._special_chars_max <= len(text):
                kept = chars, first
            for piece in self._pieces_of(segment, owner) if known is None else [segment]:
                parts.append(self._encode(piece, False, owner) if known is None else known)
                count += len(parts[-1]) // TOKEN_BYTES
                chars += len(piece)
                new_chars += len(piece) if known is None else 0
                if new_chars >= STEP_CHARS:
                    new_chars = 0
                    yield
                    if late():
                        break
                if tokens_max is not None and count > tokens_max:
                    break
            if chars < end or (tokens_max is not None and count > tokens_max):
                return Encoded(b"".join(parts), count * len(text) // max(1, chars))
            if known is None:
                self._segments.put(key, b"".join(parts[first:]))
        if kept[0]:
            self._keep_beginning(owner, text, kept[0], b"".join(parts[1 : kept[1]]))
        return Encoded(b"".join([*parts, after]), count + len(after) // TOKEN_BYTES)

    def _segments_of(self, text: str) -> Iterator[str]:
        """The text cut before each special token; each search is bounded by SEARCH_CHARS."""
        if self._special is None:
            yield text
            return
        begin = at = 0
        while at < len(text):
            window = min(at + SEARCH_CHARS, len(text))
            found = self._special.search(text, at, window)
            if found is not None:
                if found.start() > begin:
                    yield text[begin : found.start()]
                begin, at = found.start(), max(found.end(), found.start() + 1)
            elif window == len(text):
                break
            else:
                at = max(at + 1, window - self._special_chars_max)  # one may lie across the window's end
        if begin < len(text):
            yield text[begin:]

    def _pieces_of(self, segment: str, owner: str) -> Iterator[str]:
        """Cut the segment at places that change no token.

        If there is no such place, the last piece is cut at STEP_CHARS, and its last tokens may differ from the text's.
        """
        begin = 0
        while len(segment) - begin > 2 * STEP_CHARS:
            end = self._cut_of(segment, begin + STEP_CHARS, owner)
            if end is None:
                yield segment[begin : begin + STEP_CHARS]
                return
            yield segment[begin:end]
            begin = end
        yield segment[begin:]

    def _cut_of(self, text: str, begin: int, owner: str) -> int | None:
        """A place after `begin` where the text around it has the same tokens as its two halves. Merges stay within the
        words of the pre-tokenizer, so a cut that is safe nearby is safe in the whole text."""
        for match in itertools.islice(_cut_places(text, begin, begin + STEP_CHARS), CUT_TRIES):
            at = match.start()
            left, right = text[at - CUT_REACH_CHARS : at], text[at : at + CUT_REACH_CHARS]
            whole = self._encode(left + right, False, owner)
            if whole == self._encode(left, False, owner) + self._encode(right, False, owner):
                return at
        return None

    def _special_tokens_around(self) -> tuple[bytes, bytes]:
        """Ids that add_special_tokens puts before and after a text; none if they depend on the text."""
        found = set()
        for probe in _PROBES[:3]:
            plain, full = self._encode(probe, False), self._encode(probe, True)
            at = full.find(plain)
            if at < 0:
                return b"", b""
            found.add((full[:at], full[at + len(plain) :]))
        return found.pop() if len(found) == 1 else (b"", b"")

    def _encode(self, text: str, add_special_tokens: bool, owner: str = "") -> bytes:
        return self._encoder.encode(text, add_special_tokens=add_special_tokens, owner=owner)

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


def _special_pattern(specials: list[str]) -> re.Pattern[str] | None:
    longest_first = sorted(specials, key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in longest_first)) if specials else None


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
