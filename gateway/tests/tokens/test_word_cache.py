"""The word cache: bounded, the same ids as the tokenizer's own, and unused where it does not pay."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Encoding, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from spillway_gateway.routing.prefix import token_bytes
from spillway_gateway.tokens import word_cache
from spillway_gateway.tokens.tokenizer import PromptTokenizer
from spillway_gateway.tokens.word_cache import CACHED_SHARE_MIN, SAMPLE_INTERVAL_TEXTS, WordCache

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
SINGLE_DIGITS = {"digits apart", "Qwen"}


@pytest.fixture(scope="module", params=PRE_TOKENIZERS)
def tokenizer_and_cache(request: pytest.FixtureRequest) -> tuple[Tokenizer, WordCache]:
    tokenizer = trained(PRE_TOKENIZERS[request.param])
    tokenizer.add_special_tokens(["<|end|>"])
    cache = WordCache.of(tokenizer)
    assert cache is not None and (cache._single_digits or request.param not in SINGLE_DIGITS)
    return tokenizer, cache


@given(several=st.lists(texts, min_size=1, max_size=3))
@settings(deadline=None, max_examples=200)
def test_words_apart_are_the_text_s_tokens(
    tokenizer_and_cache: tuple[Tokenizer, WordCache], several: list[str]
) -> None:
    tokenizer, cache = tokenizer_and_cache  # holds the words of all examples before this one

    for text in (*several, *several):  # the second time from cachery
        assert cache.encode_by_words(text) == token_bytes(tokenizer.encode(text, add_special_tokens=False).ids)


def test_only_missing_words_are_tokenised(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = WordCache.of(tokenizer)
    assert cache is not None
    cache.encode_by_words("x the quick fox, who jumps it's over")
    encoded: list[str] = []

    class Recording:
        def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Encoding]:
            encoded.extend(texts)
            return tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(cache, "_tokenizer", Recording())
    for _ in range(2):
        cache.encode_by_words("the fox, who jumps 9 over the  quick brawn (fox) it's the")

    first = ["the", " jumps 9 over", " the  quick", " brawn (fox) it's"]
    assert encoded == [*first, *first]


def test_a_number_needs_no_library_call_once_its_digits_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = trained(PRE_TOKENIZERS["Qwen"])
    cache = WordCache.of(tokenizer)
    assert cache is not None
    cache.encode_by_words("<user>\n0123456789-5: the")
    whole = tokenizer.encode("<user>\n82-75: the", add_special_tokens=False).ids
    monkeypatch.setattr(cache, "_tokenizer", None)

    assert cache.encode_by_words("<user>\n82-75: the") == token_bytes(whole)


def test_a_vocabulary_with_tokens_across_words_has_no_cache() -> None:
    across_words = trained(None)
    assert any(" " in token.strip() for token in across_words.get_vocab())

    assert WordCache.of(across_words) is None


def test_a_normaliser_that_depends_on_the_start_of_a_text_has_no_cache() -> None:
    tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.normalizer = normalizers.Prepend(">")

    assert WordCache.of(tokenizer) is None


def test_models_other_than_byte_pair_have_no_cache() -> None:
    assert WordCache.of(Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))) is None


def test_the_cachery_of_words_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_cache, "CACHED_WORDS_MAX", 10)
    cache = WordCache.of(tokenizer)
    assert cache is not None
    for first in string.ascii_lowercase:
        text = f"{first}{first} {first} fox"
        assert cache.encode_by_words(text) == token_bytes(tokenizer.encode(text, add_special_tokens=False).ids)
        assert len(cache._words) <= 10


@given(several=st.lists(texts | st.text(max_size=40), min_size=1, max_size=40))
@settings(deadline=None, max_examples=50)
def test_ids_are_the_same_with_and_without_the_cache(tokenizer: Tokenizer, several: list[str]) -> None:
    cached, plain = PromptTokenizer(tokenizer, None), PromptTokenizer(tokenizer, None)
    assert cached._word_cache is not None
    plain._word_cache = None

    for text in (*several, *several):
        ids = cached.encode_inline(text, add_special_tokens=False, new_chars_max=len(text))
        assert ids == plain.encode_inline(text, add_special_tokens=False, new_chars_max=len(text))


PROSE = "the quick brown fox who had read it twice jumps over the lazy dog"


def test_prose_is_encoded_by_words_once_they_are_cached(tokenizer: Tokenizer) -> None:
    cache = WordCache.of(tokenizer)
    assert cache is not None
    by_words = [cache.encode(PROSE) is not None for _ in range(10 * SAMPLE_INTERVAL_TEXTS)]
    assert by_words[0]  # the first text is a sample
    assert all(by_words[-SAMPLE_INTERVAL_TEXTS:])

    assert cache.encode("Xylo " + PROSE) is not None  # 13 of 14 words are cached
    assert cache.encode(" ".join(word + word for word in PROSE.split())) is None


class CountingDict(dict[str, bytes]):
    looked_up = 0

    def get(self, key: str, default: object = None) -> bytes | None:  # type: ignore[override]
        self.looked_up += 1
        return super().get(key)


@given(words=st.lists(st.integers(1, 40), min_size=1, max_size=300))
@settings(deadline=None, max_examples=50)
def test_text_without_cached_words_is_not_even_looked_up_but_for_samples(words: list[int]) -> None:
    tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    cache = WordCache.of(tokenizer)
    assert cache is not None
    counting = cache._words = CountingDict()
    by_words = [cache.encode(" ".join(f"x_{at}" for at in range(count))) is not None for count in words]

    assert by_words == [at % SAMPLE_INTERVAL_TEXTS == 0 for at in range(len(words))]
    assert counting.looked_up == sum(words[::SAMPLE_INTERVAL_TEXTS])


@given(texts=st.lists(st.booleans(), max_size=400))
@settings(deadline=None)
def test_look_ups_in_vain_are_bounded_when_traffic_changes(tokenizer: Tokenizer, texts: list[bool]) -> None:
    cache = WordCache.of(tokenizer)
    assert cache is not None
    cache.encode_by_words("x " + PROSE)
    cache._share = 1.0
    in_vain = found = samples = 0
    for is_prose in texts:
        sampling = cache._share < CACHED_SHARE_MIN
        ids = cache.encode(PROSE if is_prose else " ".join(f"x_{at}" for at in range(13)))
        if sampling:
            samples += ids is not None
        elif is_prose:
            found += 13
            assert ids is not None
        else:
            in_vain += 13
            assert ids is None

    # A text in vain lowers the average by at least four times as much as one that pays raises it, and 18 in vain take
    # it from 1 below CACHED_SHARE_MIN; only a sample brings it back.
    assert in_vain <= found / 4 + 18 * 13 * (1 + samples)
