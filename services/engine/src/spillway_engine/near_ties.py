"""Equality of two greedy answers to one prompt up to rounding. Pure.

The token that wins a near tie is rounding: another matrix shape, another kernel or another CPU decides it otherwise, on
stock vLLM as well. So answers are compared by the log-probabilities of the tokens that were likely at each position. A
token has to be the same if it clearly leads its runner-up; behind a near tie that went the other way the texts
differ, and nothing can be compared any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Natural logarithms. How far rounding may move a log-probability between two ways of computing it. bfloat16 keeps 8
# bits, so logits between 16 and 32, as a sure model has them, lie 0.125 apart, and a log-probability is the difference
# of two of them.
ROUNDING = 0.25
TOP = 5  # tokens that an engine is asked for at each position
# Rounding moves unlikely tokens further than likely ones: below this nothing is compared (2 %).
LIKELY = -4.0


@dataclass(frozen=True, slots=True)
class Scored:
    """An answer: its tokens, and at each position the log-probabilities of the TOP most likely ones, by token id."""

    tokens: tuple[int, ...]
    tops: tuple[Mapping[int, float], ...]

    def as_json(self) -> dict[str, Any]:
        """The inverse is `from_json`."""
        return {"tokens": list(self.tokens), "tops": [dict(top) for top in self.tops]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Scored:
        """Raises KeyError, ValueError, TypeError or AttributeError for anything else."""
        tops = [{int(token): float(logprob) for token, logprob in top.items()} for top in value["tops"]]
        return cls(tuple(map(int, value["tokens"])), tuple(tops))

    def __add__(self, more: Scored) -> Scored:
        """Concatenates the pieces of an answer."""
        return Scored(self.tokens + more.tokens, self.tops + more.tops)

    @property
    def leads(self) -> list[float]:
        """The lead of the best token over the runner-up, at each position."""
        return [best[0] - best[1] for best in (sorted(top.values(), reverse=True) for top in self.tops)]


def scored(choice: Mapping[str, Any]) -> Scored:
    """A choice of vLLM's /v1/completions that was asked for with `REQUEST`."""
    tops = choice["logprobs"]["top_logprobs"]
    by_id = [{int(name.removeprefix("token_id:")): float(value) for name, value in top.items()} for top in tops]
    return Scored(tuple(choice["token_ids"]), tuple(by_id))


# Fields that a completion request needs for `scored`.
REQUEST: dict[str, Any] = {"logprobs": TOP, "return_tokens_as_token_ids": True, "return_token_ids": True}


def difference(one: Scored, other: Scored, rounding: float = ROUNDING) -> str | None:
    """The difference beyond rounding; None without one. Symmetric."""
    if len(one.tokens) != len(other.tokens):
        return f"{len(one.tokens)} tokens and {len(other.tokens)}"
    for position, (token, its) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        top, its_top = one.tops[position], other.tops[position]
        for expected, seen in ((top, its_top), (its_top, top)):
            moved = _moved(expected, seen, rounding)
            if moved is not None:
                return f"token {position + 1}: {moved}"
        if token != its:
            return None  # a near tie, or one of the two would have moved too far
    return None


def compared_tokens(one: Scored, other: Scored) -> int:
    """Return at how many positions two answers can be compared: up to the first with another token, included."""
    same = 0
    for token, its in zip(one.tokens, other.tokens, strict=False):
        if token != its:
            return same + 1
        same += 1
    return same


def _moved(top: Mapping[int, float], other: Mapping[int, float], rounding: float) -> str | None:
    floor = min(other.values())
    for token, logprob in top.items():
        # A token that is not among the other's most likely is at most as likely as the least of those.
        seen = other.get(token, min(logprob, floor))
        if logprob >= LIKELY and abs(seen - logprob) > rounding:
            return f"log p({token}) is {logprob:.3f} and {seen:.3f}"
    return None


def differences(reference: Sequence[Scored], others: Sequence[Scored], rounding: float = ROUNDING) -> dict[int, str]:
    """Place in the list -> what is different there."""
    found = {
        place: difference(one, other, rounding)
        for place, (one, other) in enumerate(zip(reference, others, strict=True))
    }
    return {place: found_one for place, found_one in found.items() if found_one is not None}
