"""fastokens gives the library's ids and forgets a tenant's words before another's text."""

from __future__ import annotations

import ctypes
import json
import os
import random
import string
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fastokens
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from spillway_gateway.routing.prefix import token_bytes
from spillway_gateway.tokens import fast_tokenizer
from spillway_gateway.tokens.fast_tokenizer import KEPT_CHARS, KEPT_SECONDS, NEW_SECONDS, FastTokenizer
from spillway_gateway.tokens.text_encoder import TextEncoder

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLIT = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
# By what pre-tokenizer, and whether fastokens keeps words of such a model in the thread's tables alone.
SHAPES = {
    "byte level": (BYTE_LEVEL, True),
    "split": (pre_tokenizers.Sequence([SPLIT, BYTES]), True),
    "digits": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]), False),
    "three splits": (pre_tokenizers.Sequence([SPLIT, SPLIT, SPLIT, BYTES]), False),
}
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
MB = 1_000_000


def trained(shape: pre_tokenizers.PreTokenizer, alphabet: list[str] = ALPHABET) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = shape
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def changed(tokenizer: Tokenizer, **fields: Any) -> str:
    document = json.loads(tokenizer.to_str())
    document["model"].update(fields)
    return json.dumps(document)


def words(seed: int, count: int, letters: int) -> str:
    made = random.Random(seed)
    return " ".join("".join(made.choices(string.ascii_lowercase, k=letters)) for _ in range(count))


def resident() -> int:
    # Pages that earlier tests have freed go back to the kernel: new words would lie there, and nothing would grow.
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grown(encode: Callable[[str], object]) -> int:
    """Bytes that the process grows by while a thread encodes a million new words."""
    found = []

    def on_a_thread_of_its_own() -> None:
        encode(words(0, 1_000, 10))
        before = resident()
        for seed in range(1, 200):
            encode(words(seed, 1_000, 10))
        found.append(resident() - before)

    thread = threading.Thread(target=on_a_thread_of_its_own)
    thread.start()
    thread.join()
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):  # it still frees its tables
        os.sched_yield()
    return found[0]


@pytest.mark.parametrize("name", [name for name, (_, by_thread) in SHAPES.items() if by_thread])
def test_no_word_is_kept(name: str) -> None:
    """Kept words take memory: 200,000 of them some 15 MB."""
    tokenizer = trained(SHAPES[name][0])
    kept = fastokens.Tokenizer.from_json_str(tokenizer.to_str())
    fast = FastTokenizer(tokenizer.to_str())

    assert grown(lambda text: kept.encode_batch_flat([text], False)) > 6 * MB
    assert grown(lambda text: fast.encode(text, False, owner=text[:8])) < 5 * MB


class Counting:
    """A model that fastokens would have, and that counts what it is asked for. now: seconds, which pass meanwhile."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.now = self.seconds_per_char = 0.0

    def encode_batch_flat(self, texts: list[str], _: bool) -> tuple[bytes, bytes]:
        self._log.extend(texts)
        self.now += self.seconds_per_char * sum(map(len, texts))
        return b"", b""


def test_words_are_forgotten_when_the_tenant_changes_and_after_so_many_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fast_tokenizer, "perf_counter", lambda: 0.0)
    log: list[str] = []
    first, second = FastTokenizer(trained(BYTE_LEVEL).to_str()), FastTokenizer(trained(BYTE_LEVEL).to_str())
    for each in (first, second):
        each._model, each._other = Counting(log), Counting(log)  # type: ignore[assignment]

    def asked(*texts: tuple[FastTokenizer, str, str]) -> list[str]:
        log.clear()
        for fast, owner, text in texts:
            fast.encode(text, False, owner)
        return list(log)

    assert asked((first, "x", "one"), (first, "y", "two"), (first, "y", "three"), (second, "y", "four")) == [
        *("a", "one", "a", "two", "three", "four")
    ]
    assert asked((second, "x", "five"), (first, "x", "six"), (first, "", "seven")) == ["a", "five", "six", "a", "seven"]
    long = "w" * (KEPT_CHARS // 2)
    assert asked(*[(first, "z", long)] * 5) == ["a", long, long, "a", long, long, "a", long]


@pytest.mark.parametrize(
    ("seconds_per_char", "texts"),
    [
        (NEW_SECONDS / 2, int(KEPT_SECONDS / (0.45 * NEW_SECONDS * 1_000)) + 1),  # new words
        (100 * NEW_SECONDS, int(KEPT_SECONDS / (0.95 * NEW_SECONDS * 1_000)) + 1),  # that waited, too
        (NEW_SECONDS / 100, KEPT_CHARS // 1_000),  # known ones
    ],
)
def test_tables_are_emptied_before_new_words_fill_them(
    seconds_per_char: float, texts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    fast = FastTokenizer(trained(BYTE_LEVEL).to_str())
    model = Counting(log)
    fast._model, fast._other = model, Counting(log)  # type: ignore[assignment]
    monkeypatch.setattr(fast_tokenizer, "perf_counter", lambda: model.now)
    fast.encode("w", False, "one")
    fast.encode("w", False, "another")
    log.clear()
    model.seconds_per_char = seconds_per_char

    while "a" not in log:
        fast.encode("w" * 1_000, False, "another")
    assert len(log) - 2 == pytest.approx(texts, abs=1)  # the letter, and the text that it made room for


def test_each_thread_has_its_own() -> None:
    log: list[str] = []
    fast = FastTokenizer(trained(BYTE_LEVEL).to_str())
    fast._model, fast._other = Counting(log), Counting(log)  # type: ignore[assignment]
    fast.encode("here", False, "x")
    thread = threading.Thread(target=fast.encode, args=("there", False, "x"))
    thread.start()
    thread.join()
    fast.encode("here", False, "x")
    assert log[-4:] == ["here", "a", "there", "here"]


@pytest.mark.parametrize("name", SHAPES)
def test_a_model_whose_first_words_cannot_be_taken_has_a_dropout(name: str) -> None:
    shape, by_thread = SHAPES[name]
    tokenizer = trained(shape)
    assert (FastTokenizer(tokenizer.to_str()).left_out != "") == by_thread
    for fields in ({"ignore_merges": True}, {"unk_token": "the"}, {"byte_fallback": True}):
        document = changed(tokenizer, **fields)
        fast = FastTokenizer(document)
        assert fast.left_out == ""
        for text in ("the quick fox", words(1, 50, 12), "\x01"):
            ids = token_bytes(Tokenizer.from_str(document).encode(text, add_special_tokens=False).ids)
            assert fast.encode(text, False) == ids


def test_the_text_that_cannot_be_computed_is_left_to_the_library() -> None:
    tokenizer = trained(BYTE_LEVEL)
    encoder = TextEncoder(tokenizer)
    assert encoder.fast

    for text in ("\x01", "a\x01b \x01\x01", "\x01" * 40, "\x02\x03"):
        ids = token_bytes(tokenizer.encode(text, add_special_tokens=False).ids)
        assert encoder.encode(text, add_special_tokens=False) == ids
        assert encoder.is_fast_for(text) == ("\x01" not in text)


def test_a_byte_that_words_are_made_of_is_spared() -> None:
    tokenizer = trained(BYTE_LEVEL)
    document = json.loads(tokenizer.to_str())
    model = document["model"]
    model["merges"].append(["\u0101", "a"])
    model["vocab"] |= {"\u0101a": len(model["vocab"]), "\u0102\u0102": len(model["vocab"]) + 1}
    assert FastTokenizer(json.dumps(document)).left_out == "\x03"


def test_a_vocabulary_without_rare_bytes_has_a_dropout() -> None:
    tokenizer = trained(BYTE_LEVEL, [letter for letter in ALPHABET if not 0x101 <= ord(letter) <= 0x108])
    assert FastTokenizer(tokenizer.to_str()).left_out == ""
    assert TextEncoder(tokenizer).fast


def test_one_that_can_compute_all_words_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """fastokens would begin with first words, and keep more."""
    tokenizer = trained(BYTE_LEVEL)
    right = fastokens.Tokenizer.from_json_str(tokenizer.to_str())
    monkeypatch.setattr(fastokens, "Tokenizer", type("Whole", (), {"from_json_str": staticmethod(lambda _: right)}))
    assert not TextEncoder(tokenizer).fast


class Watched:
    """A tokenizer whose model only notes what becomes of its cache."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.sizes: list[int] = []
        self.model = SimpleNamespace(_resize_cache=self.sizes.append)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_the_library_keeps_no_word_either() -> None:
    tokenizer = trained(BYTE_LEVEL)
    assert hasattr(tokenizer.model, "_resize_cache")
    watched = Watched(tokenizer)
    TextEncoder(watched)  # type: ignore[arg-type]
    assert watched.sizes == [0]
