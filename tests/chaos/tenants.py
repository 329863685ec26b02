"""Tenants that ask the very same things, so that a hit across them would be possible."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spillway_gateway.access.keys import hash_key
from spillway_gateway.testing.small_tokenizer import write_tokenizer
from spillway_simulator.wire.model_tokens import ModelTokens

MODEL = "chaos"
TENANTS = ("amber", "blue", "coral", "dune")
GROUPS = 60
SYSTEM_WORDS = 60
ANSWER_TOKENS = (12, 36)  # at least and at most, so that streams do not begin and end all together
PLAIN_EVERY = 5  # each fifth request is not streamed
TEXT = """
apple bridge candle desert engine forest garden harbor island jungle kettle ladder meadow needle orange pepper
quarry river silver timber umber valley window yellow zephyr anchor basket copper dagger ember falcon glacier
"""
WORDS = TEXT.split()
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Ask:
    tenant: str
    group: int
    body: dict[str, Any]

    @property
    def stream(self) -> bool:
        return bool(self.body["stream"])


def key_of(tenant: str) -> str:
    return f"sk-{tenant}-" + "0" * 40


def write_keys(folder: Path) -> dict[str, str]:
    """Keys file and salt secret; returns the gateway's section `auth`."""
    tenants = [{"name": tenant, "keys": [hash_key(key_of(tenant))]} for tenant in TENANTS]
    (folder / "keys.yaml").write_text(yaml.safe_dump({"tenants": tenants}), encoding="utf-8")
    (folder / "salt").write_text("chaos-" * 10, encoding="utf-8")
    return {"keysFile": str(folder / "keys.yaml"), "saltSecretFile": str(folder / "salt")}


def write_model_folder(folder: Path) -> None:
    """A small tokenizer whose words are one token each, and a chat template."""
    write_tokenizer(folder, " ".join(WORDS) * 50, 600, TEMPLATE)
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")


def asks(seed: int = 0) -> Iterator[Ask]:
    """Forever: tenants in turn, groups by chance, each question new."""
    chance = random.Random(seed)
    for number in itertools.count():
        group = chance.randrange(GROUPS)
        system = random.Random(group)
        messages = [
            {"role": "system", "content": " ".join(system.choice(WORDS) for _ in range(SYSTEM_WORDS))},
            {"role": "user", "content": f"{number} " + " ".join(chance.choice(WORDS) for _ in range(20))},
        ]
        body = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": chance.randint(*ANSWER_TOKENS),
            "ignore_eos": True,
            "stream": number % PLAIN_EVERY != 0,
        }
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        yield Ask(TENANTS[number % len(TENANTS)], group, body)


class Answers:
    """The answers that an engine has to give, as a function of the prompt."""

    def __init__(self, tokenizer_folder: Path) -> None:
        self._tokens = ModelTokens(tokenizer_folder)

    def to(self, ask: Ask) -> str:
        prompt: array[int] = self._tokens.chat(ask.body)
        return self._tokens.decode(self._tokens.answer(prompt, ask.body["max_tokens"]))
