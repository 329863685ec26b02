"""The event loop's tables of words are freed after so many characters, and no answer changes."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial

import fastokens
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from spillway_gateway.routing.prefix import token_bytes
from spillway_gateway.testing.running import until
from spillway_gateway.tokens import word_tables
from spillway_gateway.tokens.fair_threads import FairThreads
from spillway_gateway.tokens.tokenizer import PromptTokenizer
from spillway_gateway.tokens.word_tables import (
    PARKED_MODELS,
    WordTables,
    build_tiny_models,
    free_tables,
)
from spillway_settings.gateway_memory import EVENT_LOOP_WORDS_BYTES, WORDS_RENEWAL_CHARS

MB = 1_000_000
LETTERS = str.maketrans("0123456789", "ghijklmnop")


@pytest.fixture(scope="module")
def library() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


@pytest.fixture
def threads() -> Iterator[FairThreads]:
    with contextlib.closing(FairThreads(1, "test")) as made:
        yield made


def words(seed: int, count: int) -> str:
    """Random words of ten letters each, as tokenizers split letters from digits."""
    made = random.Random(seed)
    return " ".join(f"{made.getrandbits(40):010x}" for _ in range(count)).translate(LETTERS)


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_tables_of_all_models_of_a_thread_are_freed(library: Tokenizer) -> None:
    """The premise, of this version of fastokens: 16 MiB of short words for each model go, 8 MiB for the tiny ones come.
    On a thread of its own, as tables are a thread's."""
    freed = []

    def on_a_thread_of_its_own() -> None:
        own = [fastokens.Tokenizer.from_json_str(library.to_str()) for _ in range(2)]
        for model in own:
            for seed in range(210):
                model.encode_batch_flat([words(seed, 1_000)], False)
        tiny = build_tiny_models()
        before = resident()
        free_tables(tiny)
        freed.append(before - resident())
        assert all(model.encode_batch_flat(["the fox"], False)[0] == exact(library, "the fox") for model in own)

    thread = threading.Thread(target=on_a_thread_of_its_own)
    thread.start()
    thread.join()

    assert freed[0] > 12 * MB  # 19 to 37; 6 at most where one tiny model is missing, and the tables of one are kept


def exact(library: Tokenizer, text: str) -> bytes:
    return token_bytes(library.encode(text, add_special_tokens=False).ids)


def test_text_of_new_words_alone_fills_no_more_than_is_renewed_in_time(library: Tokenizer) -> None:
    """A thread keeps the tables of so many models at once, and each gets new words until the renewal is due."""
    filled = []

    def on_a_thread_of_its_own() -> None:
        own = [fastokens.Tokenizer.from_json_str(library.to_str()) for _ in range(PARKED_MODELS + 1)]
        texts = (words(seed, 20_000) for seed in itertools.count())  # drawn while it is measured, and soon gone
        before, chars = resident(), 0
        while chars < WORDS_RENEWAL_CHARS:
            text = next(texts)
            own[len(own) * chars // WORDS_RENEWAL_CHARS].encode_batch_flat([text], False)
            chars += len(text)
        filled.append(resident() - before)

    thread = threading.Thread(target=on_a_thread_of_its_own)
    thread.start()
    thread.join()

    assert filled[0] < EVENT_LOOP_WORDS_BYTES  # 140 MB; 550 with four times the characters


async def test_renewals_follow_the_characters_and_no_answer_changes(library: Tokenizer, threads: FairThreads) -> None:
    tokenizer = PromptTokenizer(Tokenizer.from_str(library.to_str()), None)
    tables = WordTables(threads, renewal_chars=4_000)
    texts = [f"{words(seed, 50)}<|end|>the fox" for seed in range(100)]  # 563 new characters, 14 of them in all

    for at, text in enumerate(texts):
        elsewhere = threads.run("tenant", tokenizer.encode_in_steps(words(1_000 + at, 50), add_special_tokens=False))
        assert tokenizer.encode_inline(text, add_special_tokens=False, new_chars_max=10_000, tables=tables) == exact(
            library, text
        )
        assert (await elsewhere).ids == exact(library, words(1_000 + at, 50))
    counted = tables.renewals
    assert 3 <= counted <= 56_300 // 4_000

    for text in texts:  # cached: nothing was tokenised
        tokenizer.encode_inline(text, add_special_tokens=False, new_chars_max=0, tables=tables)
    await until(lambda: not tables.renewing)
    assert tables.renewals <= counted + 1


async def test_a_long_word_is_tokenised_on_a_thread_if_that_is_slow(library: Tokenizer, threads: FairThreads) -> None:
    tokenizer = PromptTokenizer(Tokenizer.from_str(library.to_str()), None)
    tables = WordTables(threads)
    usual, word = "the fox " * 1_000, "fox" * 1_000
    for special_tokens in (False, True):
        inline = partial(
            tokenizer.encode_inline, add_special_tokens=special_tokens, new_chars_max=tokenizer.inline_chars_max
        )
        assert inline(word, tables=tables) is None
        assert inline(usual, tables=tables) == exact(library, usual)
        assert inline(word[:1_000], tables=tables) == exact(library, word[:1_000])
        encoded = await threads.run("", tokenizer.encode_in_steps(word, add_special_tokens=special_tokens))
        assert encoded.ids == exact(library, word)


async def test_text_that_is_not_ascii_counts_more(threads: FairThreads) -> None:
    tables = WordTables(threads, renewal_chars=800)
    tables.count("a" * 799)
    tables.count("")
    assert not tables.renewing
    tables.count("a")
    await until(lambda: tables.renewals == 1)
    tables.count("\u4e2d" * 100)
    await until(lambda: tables.renewals == 2)


async def test_one_renewal_at_a_time(threads: FairThreads) -> None:
    tables = WordTables(threads, renewal_chars=10)
    for _ in range(1_000):  # without letting the loop run
        tables.count("0123456789")
    await until(lambda: tables.renewals == 1)
    tables.count("0123456789")
    await until(lambda: tables.renewals == 2)


async def test_a_failure_is_said_once_and_tried_again(
    threads: FairThreads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    class Failing:
        @staticmethod
        def from_json_str(_: str) -> fastokens.Tokenizer:
            tried.append(True)
            raise MemoryError("no room")

    tables = WordTables(threads, renewal_chars=10)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(word_tables.fastokens, "Tokenizer", Failing)
        for times in (1, 2, 3):
            await until(lambda: not tables.renewing)
            tables.count("0123456789")
            await until(lambda times=times: len(tried) == times)  # type: ignore[misc]
        await until(lambda: not tables.renewing)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no room" in caplog.text
    assert tables.renewals == 0

    tables.count("0123456789")
    await until(lambda: tables.renewals == 1)


async def test_closed_threads_end_it(threads: FairThreads) -> None:
    tables = WordTables(threads, renewal_chars=10)
    threads.close()
    tables.count("0123456789")
    await until(lambda: not tables.renewing)
    assert tables.renewals == 0


def test_fastokens_starts_no_threads_of_its_own(library: Tokenizer) -> None:
    """They would keep tables for as long as the process lives. In a process of its own: they are started once."""
    script = (
        "import os, sys, tokenizers\n"
        "from spillway_gateway.tokens.text_encoder import TextEncoder\n"
        "encoder = TextEncoder(tokenizers.Tokenizer.from_str(sys.stdin.read()))\n"
        "assert encoder.fast\n"
        "encoder.encode('the fox \u00e9\u4e2d ' * 20_000, add_special_tokens=False)\n"
        "print(len(os.listdir('/proc/self/task')))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "FASTOKENS_BPE_THREADS"}
    ran = subprocess.run(
        [sys.executable, "-c", script],
        input=library.to_str(),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert ran.stdout.strip() == "1"
