"""Bounds the memory that fastokens keeps for the event loop's thread.

fastokens keeps the words that a thread has tokenised, and their ids, in tables of that thread. They double until short
words take some 140 MB and long ones as much again, of each model, and have no setting. Dropping the tokenizer does not
free them; the end of the thread does, so FairThreads ends its threads. The event loop's cannot end.

A thread's tables belong to one model. fastokens (0.3.5) keeps those of the model in use and of PARKED_MODELS before it,
and frees the least recently used when there are more. So after WORDS_RENEWAL_CHARS the thread tokenises one letter with
tiny models, which push out all others. The next text begins with tables of the vocabulary alone, as in a new
thread. Should another version of fastokens keep more models, then nothing is freed, and its own bounds hold.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Generator
from typing import NamedTuple

import fastokens

from spillway_gateway.tokens.fair_threads import FairThreads
from spillway_settings.gateway_memory import WORDS_RENEWAL_CHARS

logger = logging.getLogger(__name__)

# Plain English or code meets some hundred new words in 100,000 characters, Chinese several thousand: a clause without
# spaces is one word to a tokenizer.
NON_ASCII_WEIGHT = 8
PARKED_MODELS = 3
_LETTER = "a"


class TinyModels(NamedTuple):
    """The models of one renewal, because tables are those of an object, not of its file.

    Together they take some 35 MB, of which the C library may keep a half for the next renewal.
    """

    keeping: list[fastokens.Tokenizer]  # their tables take a place among the parked ones
    passing: fastokens.Tokenizer  # its tables are dropped when another model is used


class WordTables:
    """The tables of the thread that runs the event loop, of all models. On the event loop.

    threads: where the tiny models are built. renewal_chars: characters that are tokenised on the event loop until its
    tables are freed; in a text that is not ASCII each counts NON_ASCII_WEIGHT times."""

    def __init__(self, threads: FairThreads, renewal_chars: int = WORDS_RENEWAL_CHARS) -> None:
        self._threads = threads
        self._renewal_chars = renewal_chars
        self._chars = 0
        self._building: asyncio.Future[TinyModels] | None = None
        self._failed = False
        self.renewals = 0

    @property
    def renewing(self) -> bool:
        """Whether a renewal has begun and not ended."""
        return self._building is not None

    def count(self, text: str) -> None:
        """A text that fastokens has tokenised on the event loop. Begins a renewal when that was enough."""
        self._chars += len(text) if text.isascii() else len(text) * NON_ASCII_WEIGHT
        if self._chars >= self._renewal_chars and self._building is None:
            self._chars = 0
            self._building = self._threads.run("", _build_in_steps())
            self._building.add_done_callback(self._renew)

    def _renew(self, built: asyncio.Future[TinyModels]) -> None:
        self._building = None
        try:
            free_tables(built.result())
        except asyncio.CancelledError:  # the threads are closed
            return
        except Exception as error:
            if not self._failed:
                logger.warning(
                    "fastokens' tables of words cannot be freed, and may grow to some 300 MB for each of %d models; "
                    "tried again after %d more characters: %s",
                    PARKED_MODELS + 1,
                    self._renewal_chars,
                    error,
                )
            self._failed = True
            return
        self._failed = False
        self.renewals += 1


def free_tables(models: TinyModels) -> None:
    """Free fastokens' tables of the calling thread but those of `models`, some 8 MB. Takes about 5 ms, and must not be
    interrupted by other text on the same thread."""
    # Tables that `passing` replaces are freed with all their memory; `keeping` would take over a part of it.
    for model in models.keeping:
        models.passing.encode_batch_flat([_LETTER], False)
        model.encode_batch_flat([_LETTER], False)
    models.passing.encode_batch_flat([_LETTER], False)


def build_tiny_models() -> TinyModels:
    """New tiny models, in about 15 ms."""
    return TinyModels([_load(_KEEPING) for _ in range(PARKED_MODELS)], _load(_PASSING))


def _build_in_steps() -> Generator[None, None, TinyModels]:
    keeping = []
    for _ in range(PARKED_MODELS):
        keeping.append(_load(_KEEPING))
        yield
    return TinyModels(keeping, _load(_PASSING))


def _load(vocabulary: dict[str, int]) -> fastokens.Tokenizer:
    pre_tokenizer = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    return fastokens.Tokenizer.from_json_str(
        json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": pre_tokenizer, "model": model})
    )


_KEEPING = {_LETTER: 0}
# A token that the model cannot form itself: fastokens then has no first words to begin with, and parks no such tables.
_PASSING = {_LETTER: 0, "zz": 1}
