"""fastokens' tokenizer of one tokenizer.json, made to forget the words of one tenant before it reads another's text.

fastokens keeps the words that a thread has met and their ids, for all texts, so timing could reveal a word that another
tenant has sent: 30,000 characters of new words take 1 to 3 ms, and 0.03 ms when they come again. It has no setting for
that. But its tables belong to one model, and those of a model without first words are emptied if the thread tokenises
with another one. So here the model is given no first words, and a thread tokenises one letter with another model when
the tenant changes, and before the tables grow large.

A table doubles when it is three quarters full, and the thread waits until it is copied: some 6 ms at 98,000 words, 30
ms at 196,000. What is in the tables is not known. But a new word takes some twenty times as long as a known one, so the
time says how many were new: a text of new words alone has the tables emptied before they have 196,000, and a tenant
whose texts repeat their words keeps them for KEPT_CHARS.

Two kinds of models cannot be treated like that: those whose words fastokens keeps in the model itself, and those that
take a whole word of the vocabulary without merging. They get a dropout of merges that is too small to happen (once in
2**23 merges one is tried a moment later): with a dropout fastokens keeps nothing. Their text costs up to ten times as
much.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from time import perf_counter
from typing import Any

import fastokens

# Texts come one at a time and in pieces. So the library's threads, one per core, would gain nothing, and each would
# keep tables of words.
os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")

# Bounds on texts, beyond which a thread's tables are emptied.
KEPT_SECONDS = 0.025  # for new words
KEPT_CHARS = 4 * 1024 * 1024
KNOWN_SECONDS = 5e-9  # for a character of a known word, at least
NEW_SECONDS = 1e-7  # for one of a new word, at most; a text that takes longer has waited for the processor
_DROPOUT = 1e-44
# Bytes that hardly any text has. One of them loses its token, so that fastokens cannot compute the word of two of it
# that the vocabulary is given: a model of which one word cannot be computed has no first words.
_RARE = range(1, 9)
_BYTE_LETTERS = 0x100  # of the letters by which a vocabulary names the bytes 0 to 32
_LETTER = "a"
_OTHER_MODEL: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": {_LETTER: 0, "zz": 1}, "merges": []},  # "zz" cannot be computed
}


class FastTokenizer:
    """left_out: a character whose texts encode() refuses; empty if there is none. encode() releases the interpreter
    lock while it works."""

    def __init__(self, document: str) -> None:
        """document: a tokenizer.json. Raises any exception for one that fastokens does not read."""
        given = json.loads(document)
        self.left_out = _take_a_byte(given) if _keeps_words_by_thread(given) else ""
        if not self.left_out:
            given["model"]["dropout"] = _DROPOUT
        self._model = fastokens.Tokenizer.from_json_str(json.dumps(given))
        self._other = _other_model() if self.left_out else None

    def encode(self, text: str, add_special_tokens: bool, owner: str = "") -> bytes:
        """Return the ids as little-endian uint32. owner: the text's tenant. Raises UnicodeEncodeError for lone
        surrogates, and ValueError for a byte that the vocabulary lacks."""
        ids: bytes
        if self._other is None:
            ids, _ = self._model.encode_batch_flat([text], add_special_tokens)
            return ids
        if _kept.have_to_go(owner, len(text)):
            self._other.encode_batch_flat([_LETTER], False)
        began = perf_counter()
        try:
            ids, _ = self._model.encode_batch_flat([text], add_special_tokens)
        finally:
            _kept.took(len(text), perf_counter() - began)
        return ids


class _Kept(threading.local):
    """The owner and length of the texts whose words the calling thread's tables hold: one tenant's. Counted over all
    models, because the tables of one are emptied when another is used."""

    _owner = ""
    _chars = 0
    _seconds = 0.0

    def have_to_go(self, owner: str, chars: int) -> bool:
        """Whether the tables have to be emptied before a text of this length. They are then counted as empty."""
        self._chars += chars
        if owner == self._owner and self._chars <= KEPT_CHARS and self._seconds < KEPT_SECONDS:
            return False
        self._owner, self._chars, self._seconds = owner, chars, 0.0
        return True

    def took(self, chars: int, seconds: float) -> None:
        """A text of this length was encoded."""
        self._seconds += max(0.0, min(seconds, chars * NEW_SECONDS) - chars * KNOWN_SECONDS)


_kept = _Kept()


@functools.cache
def _other_model() -> fastokens.Tokenizer:
    return fastokens.Tokenizer.from_json_str(json.dumps(_OTHER_MODEL))


def _keeps_words_by_thread(given: dict[str, Any]) -> bool:
    """Whether fastokens keeps the model's words in the thread's tables and nowhere else (0.3.5). Not if it is in doubt:
    of other pre-tokenizers it keeps them in the model too."""
    model, pre_tokenizer = given["model"], given.get("pre_tokenizer") or {}
    if model.get("ignore_merges") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    if model.get("unk_token") is not None or model.get("byte_fallback"):  # then every word can be computed
        return False
    steps = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    kinds = [step.get("type") for step in steps]
    if kinds not in (["ByteLevel"], ["Split", "ByteLevel"]) or steps[-1].get("add_prefix_space"):
        return False
    if pre_tokenizer.get("type") == "Sequence":
        return len(steps) == 2 and steps[-1].get("use_regex") is False
    return bool(steps[-1].get("use_regex"))


def _take_a_byte(given: dict[str, Any]) -> str:
    """Take the token of a rare byte and give it to the word of two such bytes. Returns the byte as a character; empty:
    none can be taken."""
    model = given["model"]
    vocabulary, added = model["vocab"], [token["content"] for token in given.get("added_tokens") or ()]
    merged = {letter for merge in model["merges"] for letter in "".join(merge)}
    for byte in _RARE:
        letter, char = chr(_BYTE_LETTERS + byte), chr(byte)
        free = letter in vocabulary and letter not in merged and 2 * letter not in vocabulary
        if free and not any(char in text for text in added):
            vocabulary[2 * letter] = vocabulary.pop(letter)
            return char
    return ""
