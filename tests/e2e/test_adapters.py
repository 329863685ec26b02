"""LoRA adapters that real engines load, unload and load by name, through a gateway that follows them.

Minutes on two cores, so no lane runs it: `make test-adapters`.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
import yaml
from safetensors.torch import save_file
from stack_driver.deadlines import eventually
from stack_driver.running_stack import RunningStack

pytestmark = pytest.mark.skipif("TEST_ADAPTERS" not in os.environ, reason="by hand: make test-adapters")

RANK = 8
PROMPT_TOKENS = 512  # four blocks of the stack
SHORT_TOKENS = 16
APART = 0.01  # least effect of other weights on a logprob, or the comparison proves nothing
ROUNDING = 1e-3  # between a prompt computed whole and one computed behind a hit
TIMEOUT_SECONDS = 900.0


class Said(NamedTuple):
    """A reply: the first token's likeliest tokens with their logprobs, and what routing and engine said of it."""

    status: int
    logprobs: dict[str, float]
    engine: str
    expected_tokens: int
    cached_tokens: int
    error: dict[str, Any]


def write_adapter(folder: Path, model: Path, *, seed: int, rank: int = RANK) -> Path:
    """A LoRA adapter of this model: random weights of the attention's queries and values, in PEFT's format."""
    config = json.loads((model / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    outputs = {"q_proj": head * config["num_attention_heads"], "v_proj": head * config["num_key_value_heads"]}
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in outputs.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(rank, hidden, generator=rng) / hidden**0.5
            tensors[f"{place}.lora_B.weight"] = torch.randn(size, rank, generator=rng) * 0.1
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(outputs), "bias": "none"}
    settings["base_model_name_or_path"] = str(model)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


class Fleet:
    def __init__(self, stack: RunningStack, folder: Path) -> None:
        self.stack = stack
        self.folder = folder
        self.model = Path(stack.local.model.folder)
        self.gateway = httpx.Client(base_url=stack.local.gateway_url, timeout=TIMEOUT_SECONDS)

    def tokens(self, count: int = PROMPT_TOKENS) -> list[int]:
        return [random.randrange(1000, 40_000) for _ in range(count)]

    def ask(self, model: str, tokens: list[int]) -> Said:
        body = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "logprobs": 5}
        reply = self.gateway.post("/v1/completions", json=body)
        document = reply.json()
        if reply.status_code != 200:
            return Said(reply.status_code, {}, "", 0, 0, document["error"])
        usage = document["usage"].get("prompt_tokens_details") or {}
        return Said(
            reply.status_code,
            document["choices"][0]["logprobs"]["top_logprobs"][0],
            reply.headers["x-spillway-engine"],
            int(reply.headers["x-spillway-prefix-tokens"]),
            int(usage.get("cached_tokens") or 0),
            {},
        )

    def listed(self) -> list[str]:
        return [card["id"] for card in self.gateway.get("/v1/models").json()["data"]]

    def load(self, engine: int, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        reply = httpx.post(f"{self.stack.engines[engine].url}/v1/load_lora_adapter", json=body, timeout=TIMEOUT_SECONDS)
        assert reply.status_code == 200, reply.text
        eventually(f"{name} is listed", lambda: name in self.listed())

    def unload(self, engine: int, name: str) -> None:
        url = f"{self.stack.engines[engine].url}/v1/unload_lora_adapter"
        reply = httpx.post(url, json={"lora_name": name}, timeout=TIMEOUT_SECONDS)
        assert reply.status_code == 200, reply.text


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    adapters = tmp_path_factory.mktemp("adapters")
    overrides = (
        *("model.dtype=float32", f"lora.maxRank={RANK}", "lora.maxActive=2", "lora.maxInMemory=4"),
        *("lora.runtimeUpdating=true", f"lora.resolverFolder={adapters}"),
    )
    stack = RunningStack.start("nvme", tmp_path_factory.mktemp("stack"), overrides=overrides)
    try:
        path = stack.local.folder.config / "gateway.yaml"
        config = yaml.safe_load(path.read_text())
        config["models"][0] |= {"loadableAdapters": ["team-*"], "adapterAliases": {"latest": "sql-1"}}
        path.write_text(yaml.safe_dump(config))
        yield Fleet(stack, adapters)
    finally:
        stack.close()


def difference(one: Said, other: Said) -> float:
    assert one.status == other.status == 200, (one, other)
    both = one.logprobs.keys() & other.logprobs.keys()
    return max((abs(one.logprobs[token] - other.logprobs[token]) for token in both), default=float("inf"))


@pytest.mark.timeout(TIMEOUT_SECONDS)
def test_an_adapter_is_followed_from_its_load_to_its_unload(fleet: Fleet) -> None:
    base, tokens = fleet.stack.model, fleet.tokens()
    missing = fleet.ask("sql-1", tokens)
    assert (missing.status, missing.error["code"], missing.error["param"]) == (404, "model_not_found", "model")
    plain = fleet.ask(base, tokens)
    fleet.load(1, "sql-1", write_adapter(fleet.folder / "sql-1", fleet.model, seed=1))
    assert fleet.listed().count("sql-1") == 1
    first = fleet.ask("sql-1", tokens)
    # The model's blocks of this prompt count for nothing, in the index and on the engine.
    assert (first.engine, first.expected_tokens, first.cached_tokens) == ("engine-1", 0, 0)
    assert difference(first, plain) > APART
    again = eventually(
        "its blocks are announced", lambda: (said := fleet.ask("latest", tokens)).expected_tokens and said
    )
    assert again.engine == "engine-1" and again.expected_tokens == again.cached_tokens > 0
    assert difference(again, first) < ROUNDING
    assert difference(fleet.ask(base, tokens), plain) < ROUNDING
    assert {fleet.ask("sql-1", fleet.tokens()).engine for _ in range(4)} == {"engine-1"}
    fleet.unload(1, "sql-1")
    eventually("it is not listed any more", lambda: "sql-1" not in fleet.listed())
    gone = fleet.ask("sql-1", tokens)
    assert (gone.status, gone.error["code"]) == (404, "model_not_found")


@pytest.mark.timeout(TIMEOUT_SECONDS)
def test_other_weights_under_the_same_name_find_no_block_of_the_former(fleet: Fleet) -> None:
    tokens = fleet.tokens()
    ours = write_adapter(fleet.folder / "law-ours", fleet.model, seed=2)
    theirs = write_adapter(fleet.folder / "law-theirs", fleet.model, seed=3)
    fleet.load(0, "law-theirs-alone", theirs)
    reference = fleet.ask("law-theirs-alone", tokens)
    fleet.load(0, "law", ours)
    before = fleet.ask("law", tokens)
    assert difference(before, reference) > APART
    fleet.unload(0, "law")
    fleet.load(0, "law", theirs)
    after = fleet.ask("law", tokens)
    assert after.cached_tokens == 0
    assert difference(after, reference) < ROUNDING


@pytest.mark.timeout(TIMEOUT_SECONDS)
def test_adapters_are_loaded_by_name_where_one_can_be(fleet: Fleet) -> None:
    write_adapter(fleet.folder / "team-a", fleet.model, seed=4)
    write_adapter(fleet.folder / "team-large", fleet.model, seed=5, rank=2 * RANK)  # more than the engines take
    eventually("patterns are in force", lambda: fleet.ask("team-a", fleet.tokens(SHORT_TOKENS)).status == 200)
    # Of short prompts: on these cores a long one takes longer than the load of an adapter elsewhere.
    chosen = {fleet.ask("team-a", fleet.tokens(SHORT_TOKENS)).engine for _ in range(4)}
    assert len(chosen) == 1, "the engine that has it comes before the one that would load it"
    assert fleet.listed().count("team-a") == 1
    large = fleet.ask("team-large", fleet.tokens())
    assert (large.status, large.error["code"]) == (400, "adapter_not_loaded")
    nowhere = fleet.ask("team-nowhere", fleet.tokens())
    assert (nowhere.status, nowhere.error["code"]) == (404, "model_not_found")
    assert fleet.ask("../team-a", fleet.tokens()).status == 404
