"""A sick directory costs recomputation, never an answer: read-only, full, gone, and with damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest
from stack_driver.deadlines import eventually
from stack_driver.engine_metrics import new_failures
from stack_driver.known_answers import KnownAnswers, learn
from stack_driver.running_stack import RunningStack
from stack_driver.shared_stores import NvmeStore
from stack_driver.sick_folders import full, read_only, remove_in_use, replaced_by_file

pytestmark = pytest.mark.tiers("nvme")

HEADER_BYTES = 4096


def test_read_only_directory_is_still_read(stack: RunningStack) -> None:
    known = stack.learn_and_store(stack.a)
    folder = stack.local.folder.nvme
    with read_only(folder) as reasons:
        answer = stack.ask_shared(stack.b, known)
        if reasons == {"read_only"}:
            assert answer.source == "shared"
        _ask_new_prompts(stack)
        _wait_failure(stack, "store", reasons)
    stack.wait_shared_tier_works()


def test_full_file_system(stack: RunningStack) -> None:
    known = stack.learn_and_store(stack.a)
    with full(stack, stack.local.folder.nvme) as reasons:
        stack.ask_shared(stack.b, known)
        _ask_new_prompts(stack)
        _wait_failure(stack, "store", reasons)
    stack.wait_shared_tier_works()


def test_directory_removed_while_running(stack: RunningStack) -> None:
    known = stack.learn_and_store(stack.a)
    remove_in_use(stack.local.folder.nvme)
    assert stack.ask_shared(stack.b, known).source == "none"
    _ask_new_prompts(stack)
    stack.wait_shared_tier_works()
    assert _store(stack).frames() > 0, "the directory was made again"


def test_file_in_place_of_the_directory(stack: RunningStack) -> None:
    known = stack.learn_and_store(stack.a)
    with replaced_by_file(stack.local.folder.nvme) as reasons:
        assert stack.ask_shared(stack.b, known).source == "none"
        _ask_new_prompts(stack)
        _wait_failure(stack, "store", reasons)
    stack.wait_shared_tier_works()


def test_damaged_files_are_recomputed_and_never_served(stack: RunningStack) -> None:
    """Bits flipped in header and payload: the file's size tells nothing, its checksums must."""
    store = _store(stack)
    old = set(store.files())
    known = stack.learn_and_store(stack.a)
    files = sorted(set(store.files()) - old)
    assert len(files) == known.prompt.blocks
    for number, file in enumerate(files):
        size = file.stat().st_size
        _flip(file, [100, HEADER_BYTES, (HEADER_BYTES + size) // 2, size - 1][number % 4])
    before = stack.b.failures()
    answer = stack.ask_shared(stack.b, known)
    assert answer.source == "none", "damaged blocks were used"
    assert new_failures(before, stack.b.failures(), "load") == {"header", "payload"}
    # What was recomputed replaces what was damaged.
    eventually("the damaged files are replaced", lambda: store.frames() >= len(old | set(files)), 30.0)
    stack.a.nudge()
    assert stack.ask_shared(stack.a, known).source == "shared"


def test_damage_costs_the_blocks_after_it_alone(stack: RunningStack) -> None:
    store = _store(stack)
    prompt = stack.new_prompt()
    kept = prompt.blocks // 2
    old = set(store.files())
    stack.a.complete(prompt.tokens[: kept * 128 + 1], 1)
    stack.wait_stored(len(old) + kept, stack.a)
    whole = set(store.files())
    reference = KnownAnswers(prompt)
    reference.add(stack.a.ask(prompt.tokens))
    stack.wait_stored(len(old) + prompt.blocks, stack.a)
    for file in set(store.files()) - whole:
        _flip(file, HEADER_BYTES + 1)
    stack.b.forget(cpu_tier=True)
    answer = stack.b.ask(prompt.tokens)
    assert (answer.source, answer.cached_tokens) == ("shared", kept * 128)
    reference.check(answer)


def _store(stack: RunningStack) -> NvmeStore:
    store = stack.store
    assert isinstance(store, NvmeStore)
    return store


def _ask_new_prompts(stack: RunningStack) -> None:
    """Prompts that want to be stored while storing cannot work."""
    for _ in range(2):
        learn(stack.a, stack.new_prompt(2))


def _wait_failure(stack: RunningStack, operation: str, reasons: set[str]) -> None:
    """The counters say which operation failed and why."""

    def counted() -> set[str]:
        return {reason for (failed, reason), count in stack.a.failures().items() if failed == operation and count}

    eventually(f"a {operation} fails for one of {sorted(reasons)}", lambda: counted() & reasons, 30.0)


def _flip(file: Path, offset: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 0x10]))
