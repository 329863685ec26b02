"""A faulty directory costs recomputation, never an answer: read-only, full, removed, and with damaged blocks.

On slabs, the layout of local disks. Both layouts share the contract suite of connector/tests/tiers."""

from __future__ import annotations

import pytest
from reference_answers.margins import difference
from stack_driver.deadlines import eventually
from stack_driver.engine_metrics import new_failures
from stack_driver.faulty_folders import full, read_only, remove_in_use, replaced_by_file
from stack_driver.known_answers import compute_references
from stack_driver.running_stack import RunningStack
from stack_driver.shared_stores import NvmeStore, payload_offset

from spillway_connector.tiers.disk.layout_choice import suitable_mode

pytestmark = pytest.mark.tiers("nvme")

HEADER_OFFSET = 100  # within the fields that its checksum covers


def test_the_layout_is_the_one_that_suits_the_file_system(stack: RunningStack) -> None:
    """Default: slabs on a local disk. Each block counts once, and the operator's view equals what engines stored."""
    store = _store(stack)
    stack.stored()  # stores of the stack's start may still be pending
    before = store.blocks()
    known = stack.compute_and_store(stack.a)
    added = store.blocks().keys() - before.keys()
    assert len(added) == known.prompt.blocks
    assert store.holds(added)
    files = bool(store.files())
    assert files is not (store.folder / "slab").is_dir()
    answer = stack.ask_shared(stack.b, known)
    assert (answer.source, answer.cached_tokens) == ("shared", known.prompt.reusable_tokens)
    assert files is (suitable_mode(store.folder.with_name("new")).mode == "files")


def test_read_only_directory_is_still_read(stack: RunningStack) -> None:
    known = stack.compute_and_store(stack.a)
    folder = stack.local.folder.nvme
    with read_only(folder) as reasons:
        answer = stack.ask_shared(stack.b, known)
        if reasons == {"read_only"}:
            assert answer.source == "shared"
        _ask_new_prompts(stack)
        _wait_failure(stack, "store", reasons)
    stack.wait_shared_tier_works()


def test_full_file_system(stack: RunningStack) -> None:
    known = stack.compute_and_store(stack.a)
    with full(stack, stack.local.folder.nvme) as reasons:
        stack.ask_shared(stack.b, known)
        _ask_new_prompts(stack)
        _wait_failure(stack, "store", reasons)
    stack.wait_shared_tier_works()


def test_directory_removed_while_running(stack: RunningStack) -> None:
    known = stack.compute_and_store(stack.a)
    remove_in_use(stack.local.folder.nvme)
    assert stack.ask_shared(stack.b, known).source == "none"
    _ask_new_prompts(stack)
    stack.wait_shared_tier_works()
    assert _store(stack).frames() > 0, "the directory was made again"


def test_file_in_place_of_the_directory(stack: RunningStack) -> None:
    known = stack.compute_and_store(stack.a)
    with replaced_by_file(stack.local.folder.nvme) as reasons:
        assert stack.ask_shared(stack.b, known).source == "none"
        _ask_new_prompts(stack)
        _wait_failure(stack, "store", reasons)
    stack.wait_shared_tier_works()


def test_damaged_blocks_are_recomputed_and_never_served(stack: RunningStack) -> None:
    """Bits flipped in header and payload: sizes are right, so the checksums must detect it."""
    store = _store(stack)
    stack.stored()  # other stores may still be pending
    old = store.blocks().keys()
    known = stack.compute_and_store(stack.a)
    blocks = {key: frame for key, frame in store.blocks().items() if key not in old}
    assert len(blocks) == known.prompt.blocks
    for number, frame in enumerate(blocks.values()):
        payload = [payload_offset(frame, share) for share in (0.0, 0.5, 1.0)]
        store.flip(frame, [HEADER_OFFSET, *payload][number % 4])
    assert not any(store.holds([key]) for key in blocks)
    before = stack.b.failures()
    answer = stack.ask_shared(stack.b, known)
    assert answer.source == "none", "damaged blocks were used"
    assert new_failures(before, stack.b.failures(), "load") == {"header", "payload"}
    # Recomputed blocks replace the damaged ones.
    eventually("the damaged blocks are replaced", lambda: store.holds(blocks), 120.0)
    assert stack.ask_shared(stack.a, known).source == "shared"


def test_damage_costs_the_blocks_after_it_alone(stack: RunningStack) -> None:
    store = _store(stack)
    prompt = stack.new_prompt()
    kept = prompt.blocks // 2
    old = stack.stored()
    stack.a.complete(prompt.tokens[: kept * 128 + 1], 1)
    stack.wait_stored(old + kept, stack.a)
    whole = store.blocks().keys()
    reference = stack.a.ask(prompt.tokens)
    assert reference.cached_tokens == kept * 128
    stack.wait_stored(old + prompt.blocks, stack.a)
    damaged = [frame for key, frame in store.blocks().items() if key not in whole]
    assert len(damaged) == prompt.blocks - kept
    for frame in damaged:
        store.flip(frame, payload_offset(frame, 0.001))
    stack.b.reset_prefix_cache(cpu_tier=True)
    before = stack.b.failures()
    answer = stack.b.ask(prompt.tokens)
    assert new_failures(before, stack.b.failures(), "load") == {"payload"}
    assert answer.source == "shared"
    assert difference(reference.scored, answer.scored) is None
    # vLLM counts the tokens that a load has blocks for; an early load may have blocks for all of them.
    assert answer.cached_tokens in (kept * 128, prompt.reusable_tokens)


def _store(stack: RunningStack) -> NvmeStore:
    store = stack.store
    assert isinstance(store, NvmeStore)
    return store


def _ask_new_prompts(stack: RunningStack) -> None:
    """New prompts whose stores must fail."""
    for _ in range(2):
        compute_references(stack.a, stack.new_prompt(2))


def _wait_failure(stack: RunningStack, operation: str, reasons: set[str]) -> None:
    """The counters name the failed operation and the reason."""

    def counted() -> set[str]:
        return {reason for (failed, reason), count in stack.a.failures().items() if failed == operation and count}

    eventually(f"a {operation} fails for one of {sorted(reasons)}", lambda: counted() & reasons, 120.0)
