"""The fast encoder gives the library's ids, and is left where it does not."""

from __future__ import annotations

import logging

import fastokens
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from spillway_gateway.routing.prefix import token_bytes
from spillway_gateway.tokens import text_encoder
from spillway_gateway.tokens.text_encoder import TextEncoder

CORPUS = ["the quick brown fox, who had read it twice, jumps over the lazy dog. It's 9 p.m. and all is well! " * 20]
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_like(digits: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT % digits), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PRE_TOKENIZERS = {
    "byte level": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "Llama 3": split_like("1,3"),
    "Qwen": split_like("1"),
    "digits apart": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


def trained(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


@pytest.fixture(scope="module", params=PRE_TOKENIZERS)
def tokenizer_and_encoder(request: pytest.FixtureRequest) -> tuple[Tokenizer, TextEncoder]:
    tokenizer = trained(PRE_TOKENIZERS[request.param])
    encoder = TextEncoder(tokenizer)
    assert encoder.fast
    return tokenizer, encoder


def exact(tokenizer: Tokenizer, text: str) -> bytes:
    return token_bytes(tokenizer.encode(text, add_special_tokens=False).ids)


pieces = st.text(max_size=6) | st.sampled_from(
    [
        *CORPUS[0].split()[:20],
        "<|end|>",
        "<|en",
        " ",
        "\n\n",
        "\t",
        "12,345",
        "o'clock",
        "e\u0301",
        "\u4e2d\u6587",
        "\u200d\x85",
    ]
)


@given(texts=st.lists(pieces, max_size=12).map("".join) | st.lists(pieces, max_size=12).map(" ".join))
@settings(deadline=None, max_examples=3 * settings.default.max_examples)
def test_the_ids_are_those_of_the_library(tokenizer_and_encoder: tuple[Tokenizer, TextEncoder], texts: str) -> None:
    tokenizer, encoder = tokenizer_and_encoder

    assert encoder.encode(texts, add_special_tokens=False) == exact(tokenizer, texts)
    assert encoder.fast


def test_a_byte_without_a_token_is_left_to_the_library() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder = TextEncoder(tokenizer)

    assert encoder.fast
    assert encoder.encode("abcab", add_special_tokens=False) == exact(tokenizer, "abcab")


def test_lone_surrogates_are_refused(tokenizer_and_encoder: tuple[Tokenizer, TextEncoder]) -> None:
    with pytest.raises(UnicodeEncodeError):
        tokenizer_and_encoder[1].encode("the \ud800 fox", add_special_tokens=False)


def test_a_model_that_only_the_library_reads_is_left_to_it() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder = TextEncoder(tokenizer)

    assert encoder.encode("AB a", add_special_tokens=False) == exact(tokenizer, "AB a")


def test_text_that_is_not_split_into_words_is_left_to_the_library() -> None:
    tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert not TextEncoder(tokenizer).fast


class OneIdMore:
    """fastokens with a fault: other ids for texts with this word."""

    def __init__(self, right: fastokens.Tokenizer, word: str) -> None:
        self._right = right
        self._word = word

    def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
        ids, offsets = self._right.encode_batch_flat(texts, add_special_tokens)
        return (ids + b"\0\0\0\0" if self._word in texts[0] else ids), offsets


def faulty(monkeypatch: pytest.MonkeyPatch, word: str) -> Tokenizer:
    tokenizer = trained(PRE_TOKENIZERS["byte level"])
    read = fastokens.Tokenizer.from_json_str

    class Faulty:
        @staticmethod
        def from_json_str(document: str) -> OneIdMore:
            return OneIdMore(read(document), word)

    monkeypatch.setattr(fastokens, "Tokenizer", Faulty)
    return tokenizer


def test_one_that_differs_on_a_probe_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not TextEncoder(faulty(monkeypatch, "README")).fast


def test_one_that_differs_later_is_found_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(text_encoder, "CHECK_INTERVAL_TEXTS", 4)
    tokenizer = faulty(monkeypatch, "aardvark")
    encoder = TextEncoder(tokenizer)
    assert encoder.fast

    texts = [encoder.encode("an aardvark", add_special_tokens=False) for _ in range(5)]
    assert [ids == exact(tokenizer, "an aardvark") for ids in texts] == [False, False, False, True, True]
    assert not encoder.fast
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
