"""Token ids of words, for short prose that is new as a whole while most of its words are not.

Correctness: byte-pair merges only produce tokens of the vocabulary. If no token spans the end of one word, a space and
the start of the next, no merge crosses that place, and the text may be cut there: its pieces have the same ids as the
whole. `WordCache.of` checks this on the vocabulary, and on texts because a normaliser or a pre-tokenizer could still
look across the cut. Where each digit is a token of its own, a text may also be cut around digits, so a new number needs
no call of the library.

Cost: words that are not cached cost more apart than in one pass over the text, so the cache pays only where nearly all
are found. It decides from the share of words that it found lately: below CACHED_SHARE_MIN, texts take one pass of the
library at once, and one in up to SAMPLE_INTERVAL_TEXTS is encoded by words, which measures the share anew and fills the
cache. Measured with a vocabulary of 49,152 byte-pair tokens on texts of 200 and 1,000 characters in English, code,
Chinese and random names: both ways cost the same at a share of 0.75 to 0.8, at 0.9 the cache takes less than half of
the library's time, and without any cached word it takes up to twice that time.
"""

from __future__ import annotations

import re
import string

import tokenizers

from spillway_gateway.routing.prefix import token_bytes

CACHED_WORDS_MAX = 32_768  # about 4 MiB
WORD_CHARS_MAX = 24
CACHED_SHARE_MIN = 0.8  # of words, below which one pass over the text is cheaper
SHARE_WORDS = 1_024  # over which the share is averaged
# A sample without any cached word costs twice as much as one pass, so all of them add 3 %. What it costs falls with the
# share, and the interval with it.
SAMPLE_INTERVAL_TEXTS = 32

# A text may be cut before a space between an end and a start.
_ENDS = frozenset(string.ascii_letters + ".,;:?!")
_STARTS = frozenset(string.ascii_letters)
# From a start to an end. Without digits: there are too many numbers and identifiers to cache.
_is_word = re.compile(r"[A-Za-z](?:(?:[^\W\d_]|['-])*[A-Za-z])?[.,;:?!]?").fullmatch
# A token across two words. Spaces as vocabularies write them: byte level, SentencePiece, plain.
_spans_words = re.compile("[A-Za-z.,;:?!][\u0120\u2581 ][A-Za-z]").search
# A token of a digit and something else. Tokens for single bytes are not produced by merges.
_merges_a_digit = re.compile("(?!<0x[0-9A-F]{2}>$)(?=.*[0-9])..").match
_digits = re.compile("([0-9])").split
# Pre-tokenizers attach the last of several blanks to what follows it, so they must not be separated.
_blanks_before_a_digit = re.compile(r"\s\s[0-9]").search
_PROBES = (
    "The quick brown fox, who had read README.md twice, didn't jump; it's 9 p.m. and 12,345 foxes sleep.",
    "  Indented code:\n\tfor item in items: print(item)  # no comment\n\n\nEnd. A b C d",
    "Grüße aus Köln! Naïve café owners say: 東京 is far away, isn't it? 🙂 yes... no?! ok",
    "I'll WE'VE they'd o'clock CamelCase camelCase snake_case kebab-case UPPER lower 3rd x2 a1 b",
    "Order 66 of 2024-05-04: 3 x 19.99, no. 7;8 (12%) v1.2.3 user42 42nd\n1. one\n\n22 two\t3  4   5",
    "word,word word ,word word;word: word! word? Word (word) [word] word's 'word' word",
)


class WordCache:
    """Ids of words and of fragments around digits. Bounded to CACHED_WORDS_MAX of each.

    The event loop and the tokenizer threads share it without a lock: each operation on its dicts is atomic, and a lost
    update of the share or of a word costs one more call of the library.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, single_digits: bool) -> None:
        self._tokenizer = tokenizer
        self._single_digits = single_digits
        self._words: dict[str, bytes] = {}  # ids of the word with a space before it
        self._fragments: dict[str, bytes] = {}  # of text between digits, and of digits
        self._share = 0.0  # of words that were found, averaged; between 0 and 1
        self._until_sample = 1  # texts
        self._sample_interval = SAMPLE_INTERVAL_TEXTS  # texts

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> WordCache | None:
        """The cache of a tokenizer, or None where its texts may not be cut between words."""
        if not isinstance(tokenizer.model, tokenizers.models.BPE):
            return None
        if any(map(_spans_words, tokenizer.get_vocab(with_added_tokens=True))):
            return None
        single_digits = not any(map(_merges_a_digit, tokenizer.get_vocab(with_added_tokens=False)))
        caches = [cls(tokenizer, single_digits=True)] if single_digits else []
        caches.append(cls(tokenizer, single_digits=False))
        return next((cache for cache in caches if cache._agrees()), None)

    def _agrees(self) -> bool:
        whole = self._tokenizer.encode
        return all(
            self.encode_by_words(text) == token_bytes(whole(text, add_special_tokens=False).ids) for text in _PROBES
        )

    def encode(self, text: str) -> bytes | None:
        """Token ids as little-endian uint32 without special tokens around them, or None where one pass of the library
        over the text is cheaper. On the event loop or a tokenizer thread."""
        is_sample, texts = False, 1  # texts: for which this one stands
        if self._share < CACHED_SHARE_MIN:
            self._until_sample -= 1
            if self._until_sample > 0:
                return None
            is_sample, texts = True, self._sample_interval
        words = text.split(" ")
        found = list(map(self._words.get, words))
        share = 1.0 - found.count(None) / len(words)
        self._share += (share - self._share) * min(1.0, texts * len(words) / SHARE_WORDS)
        if share < CACHED_SHARE_MIN and not is_sample:
            return None
        if is_sample:
            missing_share = max(0.0, 1.0 - self._share / CACHED_SHARE_MIN)
            self._until_sample = self._sample_interval = 1 + int((SAMPLE_INTERVAL_TEXTS - 1) * missing_share)
        return self._encode_missing(words, found)

    def encode_by_words(self, text: str) -> bytes:
        """As encode(), whatever it costs."""
        words = text.split(" ")
        return self._encode_missing(words, list(map(self._words.get, words)))

    def _encode_missing(self, words: list[str], found: list[bytes | None]) -> bytes:
        """found: ids of each word, None where they are not cached; changed in place."""
        found[0] = None  # no space before it
        groups = _missing_groups(words, found)
        texts = [(" " if begin else "") + " ".join(words[begin:end]) for begin, end in groups]
        for (begin, end), ids in zip(groups, self._encode_each(texts), strict=True):
            found[begin:end] = [ids, *[b""] * (end - begin - 1)]
            if 0 < begin == end - 1 and _is_word(words[begin]):
                _put(self._words, words[begin], ids)
        return b"".join(found)  # type: ignore[arg-type]

    def _encode_each(self, texts: list[str]) -> list[bytes]:
        """One call of the library for all of them, and none where only numbers are new."""
        split = [_around_digits(text) if self._single_digits else [text] for text in texts]
        ids = {fragment: self._fragments.get(fragment) for fragments in split for fragment in fragments}
        new = [fragment for fragment, cached in ids.items() if cached is None]
        if new:
            encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
            ids.update(zip(new, [token_bytes(encoding.ids) for encoding in encodings], strict=True))
            for fragments in split:
                if len(fragments) > 1:
                    for fragment in fragments:
                        _put(self._fragments, fragment, ids[fragment])  # type: ignore[arg-type]
        return [b"".join([ids[fragment] for fragment in fragments]) for fragments in split]  # type: ignore[misc]


def _put(cache: dict[str, bytes], text: str, ids: bytes) -> None:
    if len(text) <= WORD_CHARS_MAX:
        if len(cache) >= CACHED_WORDS_MAX:
            cache.clear()  # no order of use to maintain on each look-up; common words are back after a few texts
        cache[text] = ids


def _missing_groups(words: list[str], found: list[bytes | None]) -> list[tuple[int, int]]:
    """Disjoint ranges, in order, that cover all words without ids, each extended to a cut at both ends."""
    groups = []
    end = 0
    for at in [at for at, ids in enumerate(found) if ids is None]:
        if at < end:
            continue
        begin = at
        while begin > end and not _may_cut(words, begin):
            begin -= 1
        end = at + 1
        while end < len(words) and not _may_cut(words, end):
            end += 1
        groups.append((begin, end))
    return groups


def _may_cut(words: list[str], at: int) -> bool:
    """Whether the text may be cut before the space that precedes words[at]."""
    return words[at - 1][-1:] in _ENDS and words[at][:1] in _STARTS


def _around_digits(text: str) -> list[str]:
    """The text cut before and after each digit; whole where that would separate blanks."""
    return [text] if _blanks_before_a_digit(text) else [fragment for fragment in _digits(text) if fragment]
