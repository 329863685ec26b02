"""Bytes that vLLM's own classes encoded, version by version, from the decoder to the index.

The samples are written by `python -m engine_events` in each version's environment, and compared there with what that
vLLM publishes (tests/engine_events).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.fleet.event_decoder import Undecodable, decode_batch
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.routing.fleet_view import NOTHING_HELD, HeldPrefix
from spillway_gateway.routing.prefix import token_block_keys

SAMPLES = {path.stem: json.loads(path.read_text()) for path in Path(__file__).parent.glob("engine_samples/*.json")}
BATCHES = [bytes.fromhex(step["batch"]) for sample in SAMPLES.values() for step in sample["steps"]]


class Indexed:
    """An index, and what engines of it hold of the prompts of a sample."""

    def __init__(self, *engines: str) -> None:
        self.index = PrefixIndex("m", bytes_max=10_000_000, orphans_max=100, default_block_tokens=4, clock=lambda: 0.0)
        for engine in engines:
            self.index.add_engine(engine)

    def apply(self, engine: str, sample: dict[str, Any], first: str, last: str) -> None:
        """The batches from step `first` to step `last`, both included."""
        names = [step["step"] for step in sample["steps"]]
        end = len(names) - names[::-1].index(last)
        for step in sample["steps"][names.index(first) : end]:
            batch = decode_batch(bytes.fromhex(step["batch"]))
            assert batch.undecodable == 0, step["step"]
            for event in batch.events:
                self.index.apply(engine, event)

    def held(self, engine: str, prompt: dict[str, Any], salt: str | None, lora: str | None) -> HeldPrefix:
        keys = token_block_keys(self.index.namespace(salt, lora), prompt["tokens"], 4)
        return self.index.match(keys, 4).get(engine, NOTHING_HELD)


def test_there_is_a_sample_of_each_version() -> None:
    assert set(SAMPLES) >= {"vllm-0.23.0", "vllm-0.30.0", "vllm-0.32.0", "vllm-0.33.0"}


@pytest.mark.parametrize("name", SAMPLES)
def test_blocks_are_found_under_their_own_salt_and_adapter_alone(name: str) -> None:
    sample, view = SAMPLES[name], Indexed("e")
    view.apply("e", sample, "store plain", "store salted and adapted")

    by_name = {prompt["name"]: prompt for prompt in sample["prompts"]}
    for prompt in by_name.values():
        for other in by_name.values():
            found = view.held("e", prompt, other["salt"], other["lora"])
            same = (prompt["salt"], prompt["lora"]) == (other["salt"], other["lora"])
            stored_there = prompt["tokens"] == by_name["plain"]["tokens"]  # every namespace holds these tokens
            whole = HeldPrefix(device_tokens=len(prompt["tokens"]))
            assert found == (whole if same or stored_there else HeldPrefix(device_tokens=8)), (prompt, other)
    unknown = view.held("e", by_name["plain"], "another tenant", None)
    assert unknown == NOTHING_HELD


@pytest.mark.parametrize("name", SAMPLES)
def test_the_cpu_tier_evictions_and_a_reset_are_followed(name: str) -> None:
    sample, view = SAMPLES[name], Indexed("e")
    plain = sample["prompts"][0]
    view.apply("e", sample, "store plain", "offload")
    assert view.held("e", plain, None, None) == HeldPrefix(device_tokens=12)
    view.apply("e", sample, "evict plain", "evict plain")
    assert view.held("e", plain, None, None) == HeldPrefix(device_tokens=8)

    view.apply("e", sample, "evict from the CPU tier", "evict from the CPU tier")
    assert view.held("e", plain, None, None) == HeldPrefix(device_tokens=8)
    view.apply("e", sample, "reset", "reset")
    assert view.held("e", plain, None, None) == NOTHING_HELD
    assert view.index.unknown_blocks_total == 0


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_in_the_cpu_tier_outlives_a_reset_of_the_device(name: str) -> None:
    sample, view = SAMPLES[name], Indexed("e")
    view.apply("e", sample, "store plain", "offload")
    view.apply("e", sample, "reset", "reset")
    assert view.held("e", sample["prompts"][0], None, None) == HeldPrefix(cpu_tokens=8)


@pytest.mark.parametrize("old", SAMPLES)
@pytest.mark.parametrize("new", SAMPLES)
def test_engines_of_two_versions_share_one_index(old: str, new: str) -> None:
    """The same prompt is found on both in the middle of an upgrade, and what one evicts the other still holds."""
    view = Indexed("old", "new")
    for engine, name in (("old", old), ("new", new)):
        view.apply(engine, SAMPLES[name], "store plain", "store salted and adapted")
    for prompt in SAMPLES[old]["prompts"]:
        whole = HeldPrefix(device_tokens=len(prompt["tokens"]))
        for engine in ("old", "new"):
            assert view.held(engine, prompt, prompt["salt"], prompt["lora"]) == whole
    view.apply("old", SAMPLES[old], "evict plain", "reset")
    for prompt in SAMPLES[new]["prompts"]:
        assert view.held("old", prompt, prompt["salt"], prompt["lora"]) == NOTHING_HELD
        whole = HeldPrefix(device_tokens=len(prompt["tokens"]))
        assert view.held("new", prompt, prompt["salt"], prompt["lora"]) == whole


@given(st.sampled_from(BATCHES), st.data())
def test_damaged_bytes_never_raise_anything_but_undecodable(batch: bytes, data: st.DataObject) -> None:
    damaged = bytearray(batch)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    for candidate in (bytes(damaged), bytes(damaged[:cut])):
        try:
            decoded = decode_batch(candidate)
        except Undecodable:
            continue
        view = Indexed("e")
        for event in decoded.events:
            view.index.apply("e", event)
