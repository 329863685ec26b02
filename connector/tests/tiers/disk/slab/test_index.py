from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway_connector.tiers.disk.slab.fingerprint import (
    fingerprint_of,
    fingerprints,
    fingerprints_of_padded,
    namespace_words,
)
from spillway_connector.tiers.disk.slab.index import SlabIndex
from spillway_connector.tiers.disk.slab.layout import (
    SizeClassShape,
    chunk_name,
    parse_chunk_name,
    plan_shape,
    slot_bytes_of,
)
from spillway_connector.tiers.disk.slab.policy import FREE

WORDS = namespace_words(bytes(range(16)))
PAIR = (int(WORDS[0]), int(WORDS[1]))
keys = st.binary(min_size=1, max_size=64)


# --- shapes -----------------------------------------------------------------------------------------------------------


@given(payload_bytes=st.integers(1, 1 << 26), slots=st.integers(0, 1 << 20), rest=st.floats(0, 1))
def test_a_planned_size_class_stays_within_its_bound_and_uses_most_of_it(
    payload_bytes: int, slots: int, rest: float
) -> None:
    slot_bytes = slot_bytes_of(payload_bytes)
    limit_bytes = slots * slot_bytes + int(rest * slot_bytes)
    shape = plan_shape(slot_bytes, limit_bytes)
    if shape is None:
        assert limit_bytes < slot_bytes + 16384 + 2 * max(limit_bytes // 64, slot_bytes)
        return
    beside_bytes = shape.index_bytes + shape.table_bytes
    assert shape.slots * slot_bytes + beside_bytes <= limit_bytes
    assert limit_bytes - shape.slots * slot_bytes - beside_bytes <= 3 * shape.chunk_bytes + beside_bytes
    assert SizeClassShape.unpack(shape.pack()) == shape


def test_the_index_costs_less_than_120_bytes_per_slot() -> None:
    for slots in (50_000, 1_000_000):
        shape = SizeClassShape(8192, slots // 50, 50)
        assert shape.index_bytes / shape.slots < 90


def test_any_flipped_header_bit_is_noticed() -> None:
    raw = SizeClassShape(20480, 51, 60).pack()
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        assert SizeClassShape.unpack(bytes(damaged)) is None


def test_chunk_names_are_read_back_and_nothing_else_is() -> None:
    assert parse_chunk_name(chunk_name(17, 4)) == (17, 4)
    for name in ("index", "000001.slab", "000001-00000001.slab.new", "1-1.slab"):
        assert parse_chunk_name(name) is None


# --- fingerprints -----------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_a_promise() -> None:
    found = fingerprints([bytes(range(36)), b"k"], WORDS)
    assert [[hex(half) for half in row] for row in found.tolist()] == [
        ["0x797d840abec7b983", "0xd39c255c4e797a06"],
        ["0xeb9abd178a3c742b", "0xab1b9fd909ce9670"],
    ]


@given(batch=st.lists(keys, min_size=1, max_size=20))
def test_a_key_has_one_fingerprint_whatever_comes_with_it(batch: list[bytes]) -> None:
    together = fingerprints(batch, WORDS)
    for key, row in zip(batch, together.tolist()):
        assert fingerprints([key], WORDS).tolist() == [row]
        assert list(fingerprint_of(key, PAIR)) == row
    padded = np.frombuffer(b"".join(key.ljust(64, b"\x00") for key in batch), np.uint8).reshape(-1, 64)
    lengths = np.array([len(key) for key in batch], np.uint16)
    namespaces = np.broadcast_to(WORDS, (len(batch), 2))
    assert (fingerprints_of_padded(padded, lengths, namespaces) == together).all()


@given(
    one=keys, other=keys, namespaces=st.tuples(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
)
def test_different_keys_and_namespaces_have_different_fingerprints(
    one: bytes, other: bytes, namespaces: tuple[bytes, bytes]
) -> None:
    first = fingerprints([one], namespace_words(namespaces[0])).tolist()
    second = fingerprints([other], namespace_words(namespaces[1])).tolist()
    assert (first == second) == (one == other and namespaces[0] == namespaces[1])


def test_keys_that_differ_in_one_bit_spread_over_all_buckets() -> None:
    batch = [(1 << bit).to_bytes(36, "big") for bit in range(288)]
    for half in fingerprints(batch, WORDS).T.tolist():
        for shift in (0, 32, 56):
            assert len({value >> shift & 0xFF for value in half}) > 140  # of 256; 173 are expected


@pytest.mark.parametrize("batch", [[b""], [b"x" * 65], [b"ab", b""]])
def test_a_key_of_a_wrong_length_is_refused(batch: list[bytes]) -> None:
    with pytest.raises(ValueError, match="1 to 64 bytes"):
        fingerprints(batch, WORDS)
    with pytest.raises(ValueError, match="1 to 64 bytes"):
        fingerprint_of(min(batch, key=len) if b"" in batch else batch[0], PAIR)


# --- the table --------------------------------------------------------------------------------------------------------


def new_index(folder: str, chunks: int = 4) -> SlabIndex:
    index = SlabIndex.create(Path(folder), SizeClassShape(8192, 16, chunks))
    for chunk in range(chunks):
        index.set_chunk(chunk, 1)
    return index


def claim(index: SlabIndex, slot: int, number: int) -> None:
    index.claim(slot, pair(number), namespace=1, tenant=0, owner=1, now_s=5)
    index.publish(slot)


def pair(number: int) -> tuple[int, int]:
    return fingerprint_of(number.to_bytes(36, "big"), PAIR)


def key(number: int) -> np.ndarray:
    return fingerprints([number.to_bytes(36, "big")], WORDS)


@settings(deadline=None)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["claim", "claim", "release", "evict", "recover"]), st.integers(0, 99)), max_size=150
    )
)
def test_the_index_answers_as_a_dictionary_would(actions: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        index = new_index(folder)
        model: dict[int, int] = {}
        for action, number in actions:
            if action == "claim" and number not in model:
                slot = index.free_slot()
                if slot is None:
                    slot = index.victim()
                    assert slot is not None
                    assert len(model) == 64
                    index.evict(slot)
                    del model[next(held for held, place in model.items() if place == slot)]
                claim(index, slot, number)
                model[number] = slot
            elif action == "release" and number in model:
                index.release(model.pop(number))
            elif action == "evict" and model:
                slot = index.victim()
                assert slot is not None
                index.evict(slot)
                del model[next(held for held, place in model.items() if place == slot)]
            elif action == "recover":
                assert index.recover() == len(model)
            assert index.used == len(model)
        found = index.find(np.concatenate([key(number) for number in range(100)]))
        assert found.tolist() == [model.get(number, -1) for number in range(100)]
        assert found.tolist() == [index.find_one(pair(number)) for number in range(100)]
        assert all(index.holds(slot, pair(number)) for number, slot in model.items())


def test_a_full_index_holds_every_key() -> None:
    with tempfile.TemporaryDirectory() as folder:
        index = SlabIndex.create(Path(folder), SizeClassShape(8192, 5000, 4))
        for chunk in range(4):
            index.put("chunk_epoch", chunk, 1)
        for number in range(20_000):
            claim(index, number, number)
        batch = fingerprints([number.to_bytes(36, "big") for number in range(20_000)], WORDS)
        assert index.find(batch).tolist() == list(range(20_000))
        assert [index.find_one(pair(number)) for number in range(20_000)] == list(range(20_000))
        assert index.recover() == 20_000
        assert index.find(batch).tolist() == list(range(20_000))


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32), share=st.floats(0.001, 1.0))
def test_recovery_makes_sense_of_any_noise(seed: int, share: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        index = new_index(folder)
        for number in range(50):
            claim(index, number, number)
        before = {number: index.find(key(number)).tolist()[0] for number in range(50)}
        lots = np.random.default_rng(seed)
        path = Path(folder) / "index.new"
        raw = np.frombuffer(path.read_bytes(), np.uint8).copy()
        start = index.shape.offsets()[0]["key_low"]
        hit = start + np.flatnonzero(lots.random(len(raw) - start) < share / 8)
        raw[hit] = lots.integers(0, 256, len(hit), dtype=np.uint8)
        with path.open("r+b") as file:
            file.write(raw.tobytes())
        for number, slot in before.items():  # damage is met before it is put right
            assert index.find_one(pair(number)) in (slot, -1)
        index.recover()
        assert index.used == np.count_nonzero(index.state != FREE)
        for number, slot in before.items():
            assert index.find(key(number)).tolist()[0] == index.find_one(pair(number)) in (slot, -1)
        while (victim := index.victim()) is not None:
            index.evict(victim)


def test_what_is_free_is_found_in_every_chunk() -> None:
    with tempfile.TemporaryDirectory() as folder:
        index = new_index(folder)
        for number in range(64):
            slot = index.free_slot()
            assert slot is not None
            claim(index, slot, number)
        assert index.free_slot() is None
        index.set_chunk(2, 0)
        assert index.used == 48
        assert index.free_slot() is None
        index.set_chunk(2, 2)
        slot = index.free_slot()
        assert slot is not None
        assert index.shape.chunk_of(slot) == 2
