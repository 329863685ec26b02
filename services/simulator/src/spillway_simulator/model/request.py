"""A request as the engine model sees it, and what it reports back."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from spillway_simulator.model.blocks import block_keys


class CachedTokens(NamedTuple):
    """Prompt tokens that were not computed, by where they were found."""

    device: int = 0
    cpu: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        return self.device + self.cpu + self.shared


NOTHING_CACHED = CachedTokens()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """answer: the tokens this request will generate, at least one; the model only decides when."""

    id: str
    prompt: array[int]
    answer: array[int]
    salt: str | None = None


class Progress(NamedTuple):
    """`tokens` more answer tokens of a request exist at `seconds` (virtual)."""

    request_id: str
    seconds: float
    tokens: int
    first: bool
    finished: bool
    cached: CachedTokens


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the engine."""

    request: EngineRequest
    keys: list[int]  # of the prompt's full blocks
    submitted_at: float
    computed: int = 0  # prompt tokens whose KV is on the device
    published: int = 0  # prompt blocks cached under their keys, or known to be cached by another request
    generated: int = 0
    private_blocks: int = 0
    cached: CachedTokens = NOTHING_CACHED
    held: list[int] = field(default_factory=list)  # cached blocks this request references, in order

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def remaining(self) -> int:
        return len(self.request.answer) - self.generated

    def generated_keys(self, block_tokens: int) -> list[int]:
        """Keys of the full blocks after the prompt's own. The last answer token was sampled and never computed."""
        whole = len(self.keys) * block_tokens
        tail = self.request.prompt[whole:] + self.request.answer[: max(0, self.generated - 1)]
        return block_keys(tail, block_tokens, self.request.salt, self.keys[-1] if self.keys else None)
