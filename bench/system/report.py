"""The figures of one run, simulated or real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answered:
    """One finished request. promised_tokens: what the router knew it to find, or what the engine held when it came."""

    sent_seconds: float
    first_token_seconds: float
    end_seconds: float
    prompt_tokens: int
    cached_tokens: int
    promised_tokens: int
    answer_tokens: int
    of_crowd: bool = False
    retains: bool = False


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def figures(
    answered: Sequence[Answered], seconds: float, ramp_seconds: float, begin_seconds: float = 0.0
) -> dict[str, float]:
    """The figures of what ended within `seconds`; first tokens of what was sent after the ramp. begin_seconds: when the
    first of them was sent.

    Raises:
        ValueError: nothing that was sent after the ramp has ended.
    """
    ended = [one for one in answered if one.end_seconds <= seconds]
    first_tokens = [one.first_token_seconds for one in ended if one.sent_seconds >= ramp_seconds]
    if not first_tokens:
        raise ValueError(f"no request sent after {ramp_seconds:g} s ended within {seconds:g} s: give more seconds")
    per_token = [
        (one.end_seconds - one.sent_seconds - one.first_token_seconds) / max(1, one.answer_tokens - 1) for one in ended
    ]
    prompt_tokens = sum(one.prompt_tokens for one in ended)
    cached = sum(one.cached_tokens for one in ended)
    promised = sum(one.promised_tokens for one in ended)
    return {
        "requests": len(ended),
        "input_tokens_per_second": prompt_tokens / (seconds - begin_seconds),
        "cached_share": cached / prompt_tokens,
        "promised_share": promised / prompt_tokens,
        "found_of_promised": sum(min(one.cached_tokens, one.promised_tokens) for one in ended) / max(1, promised),
        "first_token_p50_seconds": percentile(first_tokens, 0.5),
        "first_token_p90_seconds": percentile(first_tokens, 0.9),
        "first_token_p99_seconds": percentile(first_tokens, 0.99),
        "first_token_max_seconds": max(first_tokens),
        "per_output_token_p50_seconds": percentile(per_token, 0.5),
    }
