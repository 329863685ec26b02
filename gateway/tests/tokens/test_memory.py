"""What the tokenizer remembers: bounded, and never another answer than the tokenizer's own."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Encoding, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from spillway_gateway.routing.prefix import token_bytes
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


WORDS = (
    *CORPUS[0].split()[:20],
    *("Fox", "FOX,", "x1", "9", "12,345", "don't", "o'clock!", "it's?!", "rock'n'roll", "kebab-case", "snake_case"),
    *(
        "a",
        "A.",
        ".",
        "a.b",
        "(word)",
        "word)",
        "'word",
        "naïve",
        "caf\u00e9",
        "e\u0301",
        "\u0301",
        "Straße.",
        "東京",
        "🙂",
        "٣",
    ),
    *("\n", "end.\n", "\nStart", "a\nb", "\t", "\r\n", "\u00a0", "", "", "a" * 24, "a" * 25, "b" * 40 + ","),
    *("<|end|>", "the<|end|>fox", "<|end|>\nThe"),
    *(
        "2024-05-04",
        "v1.2",
        "\n\n7",
        "4\n\n",
        "3  5",
        "(12%)",
        "user42,",
        "0x1F",
        "5's",
        "\t8",
        "9\u0301",
        "7\ufe0f\u20e3",
    ),
)
texts = st.lists(st.sampled_from(WORDS) | st.text(string.printable, max_size=6) | st.text(max_size=4), max_size=14).map(
    " ".join
)
PRE_TOKENIZERS = {
    "byte level": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "Llama 3": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "SentencePiece": pre_tokenizers.Metaspace(prepend_scheme="never"),
    "digits apart": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "Qwen": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}
DIGITS_ALONE = {"digits apart", "Qwen"}


@pytest.fixture(scope="module", params=PRE_TOKENIZERS)
def tokenizer_and_memo(request: pytest.FixtureRequest) -> tuple[Tokenizer, WordMemo]:
    tokenizer = trained(PRE_TOKENIZERS[request.param])
    tokenizer.add_special_tokens(["<|end|>"])
    memo = WordMemo.of(tokenizer)
    assert memo is not None and (memo._digits_alone or request.param not in DIGITS_ALONE)
    return tokenizer, memo


@given(several=st.lists(texts, min_size=1, max_size=3))
@settings(deadline=None, max_examples=200)
def test_words_apart_are_the_text_s_tokens(tokenizer_and_memo: tuple[Tokenizer, WordMemo], several: list[str]) -> None:
    tokenizer, memo = tokenizer_and_memo  # remembers the words of all examples before this one

    for text in (*several, *several):  # the second time from memory
        assert memo.encode(text) == token_bytes(tokenizer.encode(text, add_special_tokens=False).ids)


def test_only_what_is_new_is_tokenised(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    memo = WordMemo.of(tokenizer)
    assert memo is not None
    memo.encode("x the quick fox, who jumps it's over")
    asked: list[str] = []

    class Noted:
        def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Encoding]:
            asked.extend(texts)
            return tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(memo, "_tokenizer", Noted())
    for _ in range(2):
        memo.encode("the fox, who jumps 9 over the  quick brawn (fox) it's the")

    first = ["the", " jumps 9 over", " the  quick", " brawn (fox) it's"]
    assert asked == [*first, *first]


def test_a_number_costs_nothing_once_its_digits_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = trained(PRE_TOKENIZERS["Qwen"])
    memo = WordMemo.of(tokenizer)
    assert memo is not None
    memo.encode("<user>\n0123456789-5: the")
    whole = tokenizer.encode("<user>\n82-75: the", add_special_tokens=False).ids
    monkeypatch.setattr(memo, "_tokenizer", None)

    assert memo.encode("<user>\n82-75: the") == token_bytes(whole)


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
        assert memo.encode(text) == token_bytes(tokenizer.encode(text, add_special_tokens=False).ids)
        assert len(memo._words) <= 10


def test_the_least_recently_used_segment_goes_first() -> None:
    ids = bytes(40)
    each = ENTRY_BYTES + len(ids)
    cache = SegmentCache(3 * each)
    keys = [segment_key(str(number)) for number in range(4)]
    for key in keys[:3]:
        cache.put(key, ids)
    assert cache.get_all([keys[0], keys[3]]) == [ids, None]
    cache.put(keys[3], ids)
    cache.put(keys[3], ids)  # by another thread

    assert cache.get_all(keys) == [ids, None, ids, ids]
    assert (len(cache), cache.estimated_bytes) == (3, 3 * each)
