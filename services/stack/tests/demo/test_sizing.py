import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_stack.demo.sizing import (
    ANSWER_TOKENS,
    DOCUMENTS,
    LENGTHS,
    PROBES,
    EngineLimits,
    choose_document_tokens,
    cpu_chunks_needed,
    probe_tokens,
    prompt_tokens_max,
    short_answers_to_evict,
)
from spillway_stack.errors import StackError
from spillway_stack.settings import VALKEY_MAX_BYTES, StackSettings

# The stack's defaults: `make up` without any variable.
SETTINGS = StackSettings()
BYTES_PER_TOKEN = {"bfloat16": 23_040, "float32": 46_080}  # of the bundled model
DEFAULT = EngineLimits(
    max_length=SETTINGS.max_length,
    block_size=SETTINGS.block_size,
    chunk_tokens=SETTINGS.block_size,
    device_blocks=SETTINGS.device_blocks,
    cpu_chunks=SETTINGS.num_cpu_blocks,
    bytes_per_token=BYTES_PER_TOKEN["bfloat16"],
)


@pytest.mark.parametrize(
    ("tokens_per_second", "tokens"),
    [(5_000, 4096), (1_000, 4096), (520, 4096), (380, 2048), (256, 2048), (100, 512), (3, 256)],
)
def test_the_length_follows_the_prefill_rate(tokens_per_second: float, tokens: int) -> None:
    assert choose_document_tokens(tokens_per_second, DEFAULT) == tokens


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        (replace(DEFAULT, cpu_chunks=108), 4096),
        (replace(DEFAULT, cpu_chunks=107), 2048),
        (replace(DEFAULT, cpu_chunks=204, device_blocks=200, max_length=16_384), 8192),
        (replace(DEFAULT, cpu_chunks=204, device_blocks=200), 4096),
        (replace(DEFAULT, device_blocks=30, max_length=29 * 128), 2048),
        (replace(DEFAULT, max_length=1_100), 512),
    ],
)
def test_the_length_never_exceeds_what_the_engine_holds(limits: EngineLimits, tokens: int) -> None:
    assert choose_document_tokens(1e9, limits) == tokens


def test_the_documents_take_at_most_half_of_the_shared_tier() -> None:
    assert choose_document_tokens(1e9, DEFAULT, shared_tier_bytes=4096 * 23_040 * DOCUMENTS * 2) == 4096
    assert choose_document_tokens(1e9, DEFAULT, shared_tier_bytes=4096 * 23_040 * DOCUMENTS * 2 - 1) == 2048


def test_too_small_an_engine_is_refused_with_the_numbers_that_would_do() -> None:
    small = replace(DEFAULT, cpu_chunks=3, device_blocks=4, max_length=384)
    with pytest.raises(StackError, match=r"DEVICE_BLOCKS >= 4 and NUM_CPU_BLOCKS >= 8"):
        choose_document_tokens(1000, small)
    assert choose_document_tokens(1000, replace(small, cpu_chunks=10, device_blocks=5, max_length=512)) == 256


def test_a_chunk_longer_than_every_document_is_refused() -> None:
    with pytest.raises(StackError, match="one chunk has 16384"):
        choose_document_tokens(1000, replace(DEFAULT, chunk_tokens=16_384))


@given(prompt_tokens=st.integers(1, 100_000), chunk=st.sampled_from([16, 128, 256]))
def test_reusable_tokens_are_whole_chunks_and_leave_a_token_to_compute(prompt_tokens: int, chunk: int) -> None:
    reusable = replace(DEFAULT, chunk_tokens=chunk).reusable_tokens(prompt_tokens)
    assert reusable % chunk == 0
    assert reusable < prompt_tokens <= reusable + chunk


@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_prompt_just_below_its_limit_reuses_the_documents_length(tokens: int) -> None:
    assert DEFAULT.reusable_tokens(prompt_tokens_max(tokens, DEFAULT) - 1) == tokens


@pytest.mark.parametrize(
    ("shared_tier_bytes", "dtype", "longest"),
    [
        (SETTINGS.nvme_max_bytes, "bfloat16", 4096),
        (SETTINGS.nvme_max_bytes, "float32", 4096),
        (VALKEY_MAX_BYTES, "bfloat16", 4096),
        (VALKEY_MAX_BYTES, "float32", 2048),
    ],
)
def test_the_default_stack_fits_every_length_up_to(shared_tier_bytes: int, dtype: str, longest: int) -> None:
    limits = replace(DEFAULT, bytes_per_token=BYTES_PER_TOKEN[dtype])
    chosen = {choose_document_tokens(rate, limits, shared_tier_bytes) for rate in (math.inf, *range(1, 1500))}
    assert chosen == {tokens for tokens in LENGTHS if tokens <= longest}


@given(data=st.data(), tokens=st.sampled_from(LENGTHS), chunk=st.sampled_from([64, 128, 256]))
def test_the_documents_stay_in_a_cpu_tier_that_has_just_enough_rows(
    data: st.DataObject, tokens: int, chunk: int
) -> None:
    """All requests until the phase that loads from it, the answer of each document different each time.

    The tier drops the chunk that was stored or used longest ago.
    """
    limits = replace(DEFAULT, chunk_tokens=chunk, block_size=min(chunk, 128))
    rows = OrderedDict[str, None]()

    def ask(name: str, prompt_tokens: int) -> None:
        whole = (prompt_tokens + ANSWER_TOKENS) // chunk
        of_prompt = prompt_tokens // chunk
        answer = data.draw(st.integers(0, 3))
        for index in range(whole):
            rows[key := f"{name}:{index}" + f":{answer}" * (index >= of_prompt)] = None
            rows.move_to_end(key)
        while len(rows) > cpu_chunks_needed(tokens, limits):
            rows.popitem(last=False)

    for probe in range(PROBES):
        ask(f"probe {probe}", data.draw(st.integers(1, probe_tokens(limits) - 1)))
    entry = 60  # tokens: a book ends by so many before its limit
    most = prompt_tokens_max(tokens, limits)
    prompts = [data.draw(st.integers(most - entry, most - 1)) for _ in range(DOCUMENTS)]
    for document, prompt_tokens in enumerate(prompts):
        ask(str(document), prompt_tokens)
        ask(str(document), prompt_tokens)
    for document in range(DOCUMENTS):
        for other in range(DOCUMENTS):
            if other != document:
                ask(str(other), prompts[other])
        reusable = limits.reusable_tokens(prompts[document]) // chunk
        assert all(f"{document}:{index}" in rows for index in range(reusable))
        ask(str(document), prompts[document])


class _DeviceCache:
    """The order in which an engine's block pool reuses blocks: oldest free one first, of a request its tail first.

    uncached_first: blocks that cache nothing before all others, as of vLLM 0.30.
    """

    def __init__(self, blocks: int, *, uncached_first: bool = False) -> None:
        self.free: OrderedDict[int, str] = OrderedDict((block, "") for block in range(blocks))
        self._uncached_first = uncached_first

    def held(self, name: str) -> int:
        return sum(content.startswith(f"{name}:") for content in self.free.values())

    def ask(self, name: str, whole_blocks: int) -> int:
        """A request of `whole_blocks` and one partial block; returns how many it found."""
        where = {content: block for block, content in self.free.items() if content.startswith(f"{name}:")}
        used: list[tuple[int, str]] = []
        for index in range(whole_blocks):
            if (content := f"{name}:{index}") not in where:
                break
            used.append((where[content], content))
            del self.free[where[content]]
        found = len(used)
        for index in range(found, whole_blocks + 1):
            block, _ = self.free.popitem(last=False)
            used.append((block, f"{name}:{index}" if index < whole_blocks else ""))
        self._release(reversed(used))
        return found

    def take(self, count: int) -> None:
        """Blocks that cache nothing, all at the same time; no more than there are."""
        self._release([(self.free.popitem(last=False)[0], "") for _ in range(min(count, len(self.free)))])

    def _release(self, used: Iterable[tuple[int, str]]) -> None:
        for block, content in used:
            self.free[block] = content
            if self._uncached_first and not content:
                self.free.move_to_end(block, last=False)


@given(
    device_blocks=st.integers(5, 400),
    document_blocks=st.integers(2, 64),
    document=st.integers(0, DOCUMENTS - 1),
    uncached_first=st.booleans(),
)
def test_enough_short_answers_push_a_document_off_the_device(
    device_blocks: int, document_blocks: int, document: int, uncached_first: bool
) -> None:
    if document_blocks + 2 > device_blocks - 1:
        return
    cache = _DeviceCache(device_blocks - 1, uncached_first=uncached_first)
    for name in range(DOCUMENTS):
        cache.ask(str(name), document_blocks)
        assert cache.ask(str(name), document_blocks) == document_blocks
    for other in range(DOCUMENTS):
        if other != document:
            cache.ask(str(other), document_blocks)
    cache.take(short_answers_to_evict(document_blocks, replace(DEFAULT, device_blocks=device_blocks)))
    assert cache.held(str(document)) == 0


def test_one_short_answer_after_the_other_takes_the_same_block() -> None:
    """The answers have to be asked for at the same time because of this."""
    cache = _DeviceCache(DEFAULT.device_blocks - 1, uncached_first=True)
    for name in ("0", "1", "2", "1", "2"):
        cache.ask(name, 16)
    for _ in range(short_answers_to_evict(16, DEFAULT)):
        cache.take(1)
    assert cache.held("0") == 16


def test_other_documents_alone_would_not_evict_with_the_default_sizes() -> None:
    cache = _DeviceCache(DEFAULT.device_blocks - 1)
    for name in ("0", "1", "2", "1", "2"):
        cache.ask(name, 32)
    assert cache.held("0") > 0
