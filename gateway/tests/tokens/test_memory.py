"""What the tokenizer remembers: bounded, and never another answer than the tokenizer's own."""

from __future__ import annotations

import string
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from spillway_gateway.tokens import word_memo
from spillway_gateway.tokens.segment_cache import ENTRY_BYTES, SegmentCache, segment_key
from spillway_gateway.tokens.word_memo import WordMemo

CORPUS = ["the quick brown fox, who had read it twice, jumps over the lazy dog. It's 9 p.m. and all is well! " * 20]


def trained(pre_tokenizer: pre_tokenizers.PreTokenizer | None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained(pre_tokenizers.ByteLevel(add_prefix_space=False))


words = st.sampled_from([*CORPUS[0].split(), "Fox", "x1", "9", "don't", "東京", "\n", "", "a" * 40]) | st.text(
    string.printable, max_size=6
)


@given(text=st.lists(words, max_size=12).map(" ".join))
def test_words_apart_are_the_text_s_tokens(tokenizer: Tokenizer, text: str) -> None:
    memo = WordMemo.of(tokenizer)
    assert memo is not None

    expected = tokenizer.encode(text, add_special_tokens=False).ids
    assert list(memo.encode(text)) == expected
    assert list(memo.encode(text)) == expected  # now from memory


def test_a_vocabulary_that_reaches_over_words_is_left_alone() -> None:
    over_words = trained(None)
    assert any(" " in token.strip() for token in over_words.get_vocab())

    assert WordMemo.of(over_words) is None


def test_a_normaliser_that_looks_at_the_start_of_a_text_is_noticed() -> None:
    tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.normalizer = normalizers.Prepend(">")

    assert WordMemo.of(tokenizer) is None


def test_other_kinds_of_models_are_left_alone() -> None:
    assert WordMemo.of(Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))) is None


def test_the_memory_of_words_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_memo, "WORDS_MAX", 10)
    memo = WordMemo.of(tokenizer)
    assert memo is not None
    for first in string.ascii_lowercase:
        text = f"{first}{first} {first} fox"
        assert list(memo.encode(text)) == tokenizer.encode(text, add_special_tokens=False).ids
        assert len(memo._words) <= 10


def test_the_least_recently_used_segment_goes_first() -> None:
    ids = array("I", range(10))
    each = ENTRY_BYTES + 10 * ids.itemsize
    cache = SegmentCache(3 * each)
    keys = [segment_key(str(number)) for number in range(4)]
    for key in keys[:3]:
        cache.put(key, ids)
    assert cache.get(keys[0]) == ids
    cache.put(keys[3], ids)
    cache.put(keys[3], ids)  # by another thread

    assert [cache.get(key) is not None for key in keys] == [True, False, True, True]
    assert (len(cache), cache.estimated_bytes) == (3, 3 * each)
