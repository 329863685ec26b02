"""Token ids of words, for short texts that are new as a whole: most of their words are not.

Byte-pair merges only ever make tokens that are in the vocabulary. Where no token reaches from the end of a word over a
space into the next word, nothing is ever merged across that place, so a text may be cut there and its pieces tokenised
apart: the ids are the same. That is checked on the vocabulary when a tokenizer is loaded, and on texts, as normalisers
and patterns that split text before the merges could still look across.

Where every digit is a token of its own, as in most vocabularies of late, a text may be cut around it too: a number that
nobody has seen costs no more than one that everybody has.
"""

from __future__ import annotations

import re
import string

import tokenizers

from spillway_gateway.routing.prefix import token_bytes

WORDS_MAX = 32_768  # about 4 MiB
WORD_CHARS_MAX = 24

# A text may be cut before a space between an end and a start.
_ENDS = frozenset(string.ascii_letters + ".,;:?!")
_STARTS = frozenset(string.ascii_letters)
# From a start to an end. Without digits: numbers and names of things are too many to remember.
_is_word = re.compile(r"[A-Za-z](?:(?:[^\W\d_]|['-])*[A-Za-z])?[.,;:?!]?").fullmatch
# Spaces as vocabularies write them: byte level, SentencePiece, plain.
_reaches_over = re.compile("[A-Za-z.,;:?!][\u0120\u2581 ][A-Za-z]").search
# More than the digit itself; what stands for a single byte is no product of merges.
_joins_a_digit = re.compile("(?!<0x[0-9A-F]{2}>$)(?=.*[0-9])..").match
_digits = re.compile("([0-9])").split
# The last blank of several may belong to what follows it, so they are not to be parted from it.
_blanks_before_a_digit = re.compile(r"\s\s[0-9]").search
_PROBES = (
    "The quick brown fox, who had read README.md twice, didn't jump; it's 9 p.m. and 12,345 foxes sleep.",
    "  Indented code:\n\tfor item in items: print(item)  # no comment\n\n\nEnd. A b C d",
    "Grüße aus Köln! Naïve café owners say: 東京 is far away, isn't it? 🙂 yes... no?! ok",
    "I'll WE'VE they'd o'clock CamelCase camelCase snake_case kebab-case UPPER lower 3rd x2 a1 b",
    "Order 66 of 2024-05-04: 3 x 19.99, no. 7;8 (12%) v1.2.3 user42 42nd\n1. one\n\n22 two\t3  4   5",
    "word,word word ,word word;word: word! word? Word (word) [word] word's 'word' word",
)


class WordMemo:
    """Shared by the event loop and the tokenizer threads: each step on the dict is atomic."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, digits_alone: bool) -> None:
        self._tokenizer = tokenizer
        self._digits_alone = digits_alone
        self._words: dict[str, bytes] = {}  # ids of the word with a space before it
        self._fragments: dict[str, bytes] = {}  # of what stands between digits, and of digits

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> WordMemo | None:
        """None where texts of this tokenizer may not be cut between words."""
        if not isinstance(tokenizer.model, tokenizers.models.BPE):
            return None
        if any(map(_reaches_over, tokenizer.get_vocab(with_added_tokens=True))):
            return None
        digits_alone = not any(map(_joins_a_digit, tokenizer.get_vocab(with_added_tokens=False)))
        memos = [cls(tokenizer, digits_alone=True)] if digits_alone else []
        memos.append(cls(tokenizer, digits_alone=False))
        return next((memo for memo in memos if memo._agrees()), None)

    def _agrees(self) -> bool:
        whole = self._tokenizer.encode
        return all(self.encode(text) == token_bytes(whole(text, add_special_tokens=False).ids) for text in _PROBES)

    def encode(self, text: str) -> bytes:
        """Token ids as little-endian uint32, without special tokens around them."""
        pieces = text.split(" ")
        found = list(map(self._words.get, pieces))
        found[0] = None  # no space before it
        groups = _groups_of_new(pieces, found)
        texts = [(" " if begin else "") + " ".join(pieces[begin:end]) for begin, end in groups]
        for (begin, end), ids in zip(groups, self._encode_each(texts), strict=True):
            found[begin:end] = [ids, *[b""] * (end - begin - 1)]
            if 0 < begin == end - 1 and _is_word(pieces[begin]):
                _remember(self._words, pieces[begin], ids)
        return b"".join(found)  # type: ignore[arg-type]

    def _encode_each(self, texts: list[str]) -> list[bytes]:
        """One call of the library for all of them, and none where numbers are all that is new."""
        split = [_around_digits(text) if self._digits_alone else [text] for text in texts]
        ids = {fragment: self._fragments.get(fragment) for fragments in split for fragment in fragments}
        new = [fragment for fragment, known in ids.items() if known is None]
        if new:
            encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
            ids.update(zip(new, [token_bytes(encoding.ids) for encoding in encodings], strict=True))
            for fragments in split:
                if len(fragments) > 1:
                    for fragment in fragments:
                        _remember(self._fragments, fragment, ids[fragment])  # type: ignore[arg-type]
        return [b"".join([ids[fragment] for fragment in fragments]) for fragments in split]  # type: ignore[misc]


def _remember(memo: dict[str, bytes], text: str, ids: bytes) -> None:
    if len(text) <= WORD_CHARS_MAX:
        if len(memo) >= WORDS_MAX:
            memo.clear()  # all: a text of yesterday's words is rarer than a crowd of made-up ones
        memo[text] = ids


def _groups_of_new(pieces: list[str], found: list[bytes | None]) -> list[tuple[int, int]]:
    """Ranges of pieces that hold all that were not found, each with as many neighbours as it takes to lie between two
    cuts. In order and apart."""
    groups = []
    end = 0
    for at in [at for at, ids in enumerate(found) if ids is None]:
        if at < end:
            continue
        begin = at
        while begin > end and not _may_cut(pieces, begin):
            begin -= 1
        end = at + 1
        while end < len(pieces) and not _may_cut(pieces, end):
            end += 1
        groups.append((begin, end))
    return groups


def _may_cut(pieces: list[str], at: int) -> bool:
    """Whether before the space that leads to pieces[at]."""
    return pieces[at - 1][-1:] in _ENDS and pieces[at][:1] in _STARTS


def _around_digits(text: str) -> list[str]:
    """The text cut before and after each digit; whole where that may not be."""
    return [text] if _blanks_before_a_digit(text) else [fragment for fragment in _digits(text) if fragment]
