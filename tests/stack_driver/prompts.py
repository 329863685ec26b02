"""Prompts as token ids: deterministic by name, different names share no block. Random tokens give near ties, so
that a single wrong byte of KV shows in the answer."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

BLOCK_TOKENS = 128
TAIL_TOKENS = 37  # beyond the last full block: always computed
_FIRST_TOKEN, _LAST_TOKEN = 1_000, 40_000  # plain vocabulary of the bundled model


@dataclass(frozen=True, slots=True)
class Prompt:
    name: str
    tokens: tuple[int, ...] = field(repr=False)
    shared_blocks: int = 0  # leading blocks that other prompts of its group have too

    @property
    def blocks(self) -> int:
        return len(self.tokens) // BLOCK_TOKENS

    @property
    def reusable_tokens(self) -> int:
        """Number of tokens that a full hit covers: whole blocks, and never the last token."""
        return (len(self.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def shared_tokens(self) -> int:
        return self.shared_blocks * BLOCK_TOKENS


def make_prompt(name: str, blocks: int) -> Prompt:
    return Prompt(name, tuple(_tokens(name, blocks * BLOCK_TOKENS + TAIL_TOKENS)))


def make_group(name: str, prompts: int, shared_blocks: int, own_blocks: int) -> list[Prompt]:
    """Prompts with one shared prefix, like turns of one conversation or questions about one document."""
    beginning = _tokens(f"{name} beginning", shared_blocks * BLOCK_TOKENS)
    return [
        Prompt(
            f"{name} {number}",
            tuple(beginning + _tokens(f"{name} {number}", own_blocks * BLOCK_TOKENS + TAIL_TOKENS)),
            shared_blocks,
        )
        for number in range(prompts)
    ]


def make_prompts(total: int) -> list[Prompt]:
    """`total` prompts of two to six blocks in groups of five, each group with its own shared beginning."""
    prompts: list[Prompt] = []
    for group in range(-(-total // 5)):
        shared_blocks, own_blocks = 1 + group % 3, 1 + (group // 3) % 3
        prompts += make_group(f"group {group}", 5, shared_blocks, own_blocks)
    return prompts[:total]


def _tokens(name: str, count: int) -> list[int]:
    chance = random.Random(name)
    return [chance.randrange(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(count)]
