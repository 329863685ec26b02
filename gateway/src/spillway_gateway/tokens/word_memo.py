"""Token ids of words, for short texts that are new as a whole: most of their words are not.

Byte-pair merges only ever make tokens that are in the vocabulary. Where no token reaches from the end of a word over a
space into the next word, nothing is ever merged across that place, so a text may be cut there and its pieces tokenised
apart: the ids are the same. That is checked on the vocabulary when a tokenizer is loaded, and on texts, as normalisers
and patterns that split text before the merges could still look across.
"""

from __future__ import annotations

import re
from array import array
from itertools import chain

import tokenizers

WORDS_MAX = 32_768  # about 8 MiB
WORD_CHARS_MAX = 24

_cut = re.compile(r"(?<=[A-Za-z.,;:?!])(?= [A-Za-z])").split
# Spaces as vocabularies write them: byte level, SentencePiece, plain.
_reaches_over = re.compile("[A-Za-z.,;:?!][\u0120\u2581 ][A-Za-z]").search
_PROBES = (
    "The quick brown fox, who had read README.md twice, didn't jump; it's 9 p.m. and 12,345 foxes sleep.",
    "  Indented code:\n\tfor item in items: print(item)  # no comment\n\n\nEnd. A b C d",
    "Grüße aus Köln! Naïve café owners say: 東京 is far away, isn't it? 🙂 yes... no?! ok",
    "I'll WE'VE they'd o'clock CamelCase camelCase snake_case kebab-case UPPER lower 3rd x2 a1 b",
    "word,word word ,word word;word: word! word? Word (word) [word] word's 'word' word",
)


class WordMemo:
    """Shared by the event loop and the tokenizer threads: each step on the dict is atomic."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words: dict[str, tuple[int, ...]] = {}

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> WordMemo | None:
        """None where texts of this tokenizer may not be cut between words."""
        if not isinstance(tokenizer.model, tokenizers.models.BPE):
            return None
        if any(map(_reaches_over, tokenizer.get_vocab(with_added_tokens=True))):
            return None
        memo = cls(tokenizer)
        agrees = all(
            list(memo.encode(text)) == tokenizer.encode(text, add_special_tokens=False).ids for text in _PROBES
        )
        return memo if agrees else None

    def encode(self, text: str) -> array[int]:
        """Token ids without special tokens around them. Raises UnicodeEncodeError for lone surrogates."""
        pieces = _cut(text)
        words = self._words
        try:
            return array("I", chain.from_iterable(map(words.__getitem__, pieces)))
        except KeyError:
            pass
        found = {piece: words.get(piece) for piece in pieces}
        new = [piece for piece, ids in found.items() if ids is None]
        encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        for piece, encoding in zip(new, encodings, strict=True):
            found[piece] = ids = tuple(encoding.ids)
            if len(piece) <= WORD_CHARS_MAX and piece[1:].isalpha():
                if len(words) >= WORDS_MAX:
                    words.clear()  # all of them: a text of yesterday's words is rarer than a crowd of made-up ones
                words[piece] = ids
        return array("I", chain.from_iterable(map(found.__getitem__, pieces)))  # type: ignore[arg-type]
