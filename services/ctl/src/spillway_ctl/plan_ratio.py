"""Numbers of prefill and decode engines that a trace needs, by measured rates of one engine of each. Pure.

A trace has one JSON object a line, as Mooncake's have: `timestamp` in milliseconds, `input_length` and `output_length`
in tokens, and `hash_ids` of the prompt's blocks. What an earlier prompt began with counts as cached, so that a prefill
engine computes the rest. A decode engine answers a number of requests at once, and each of them takes its tokens' time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

from spillway_ctl.errors import CommandError

WINDOW_SECONDS = 60.0
USED_SHARE = 0.8  # of an engine's time in the busiest window; the rest is for arrivals that come together


@dataclass(frozen=True, slots=True)
class ApartRates:
    """token_seconds: The time between two tokens of an answer. answers: How many answers one decode engine gives at
    once at that pace."""

    prefill_tokens_per_second: float
    token_seconds: float
    answers: int


@dataclass(frozen=True, slots=True)
class Apart:
    """Engines that are busy all the time, in the mean and in the busiest window, and those to run."""

    requests: int
    cached_share: float
    prefill_mean: float
    prefill_busiest: float
    decode_mean: float
    decode_busiest: float
    prefill_engines: int
    decode_engines: int


def apart(lines: Iterable[str], rates: ApartRates) -> Apart:
    """Count a trace. Raises CommandError."""
    seen: set[int] = set()
    prefill: dict[int, float] = {}  # seconds of engines, by window
    decode: dict[int, float] = {}
    requests, prompt_tokens, computed_tokens, last_window = 0, 0.0, 0.0, 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        at_ms, given, answered, ids = _read(line, number)
        known = next((at for at, each in enumerate(ids) if each not in seen), len(ids))
        seen.update(ids)
        computed = given * (1 - known / len(ids))
        window = int(at_ms / 1000.0 / WINDOW_SECONDS)
        prefill[window] = prefill.get(window, 0.0) + computed / rates.prefill_tokens_per_second
        decode[window] = decode.get(window, 0.0) + answered * rates.token_seconds / rates.answers
        requests, last_window = requests + 1, max(last_window, window)
        prompt_tokens, computed_tokens = prompt_tokens + given, computed_tokens + computed
    if not requests:
        raise CommandError("--trace: no request in it; give a file with a line of JSON for each request")
    windows = last_window - min(prefill) + 1
    busiest = [max(seconds.values()) / WINDOW_SECONDS for seconds in (prefill, decode)]
    mean = [sum(seconds.values()) / WINDOW_SECONDS / windows for seconds in (prefill, decode)]
    engines = [max(1, math.ceil(each / USED_SHARE)) for each in busiest]
    return Apart(
        requests, 1 - computed_tokens / prompt_tokens, mean[0], busiest[0], mean[1], busiest[1], engines[0], engines[1]
    )


def apart_line(found: Apart) -> str:
    return (
        f"prefill and decode apart: {found.prefill_engines} prefill and {found.decode_engines} decode engines for the "
        f"busiest of the trace's minutes ({found.prefill_busiest:.2f} and {found.decode_busiest:.2f} busy; mean "
        f"{found.prefill_mean:.2f} and {found.decode_mean:.2f}); {found.requests:,} requests, "
        f"{found.cached_share:.0%} of their prompts cached"
    )


def _read(line: str, number: int) -> tuple[float, int, int, list[int]]:
    try:
        document = json.loads(line)
        at_ms, given, answered = (document[name] for name in ("timestamp", "input_length", "output_length"))
        found = float(at_ms), int(given), int(answered), [int(each) for each in document["hash_ids"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"--trace: line {number}: {error!r}; timestamp, input_length, output_length and hash_ids are needed"
        ) from error
    if found[0] < 0 or not math.isfinite(found[0]) or found[1] < 1 or found[2] < 0 or not found[3]:
        raise CommandError(
            f"--trace: line {number}: a time or a length below its least, or no hash_ids; needed are a timestamp and "
            "an output_length from 0, an input_length from 1, and one of hash_ids"
        )
    return found
