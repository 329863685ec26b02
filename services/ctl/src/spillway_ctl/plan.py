"""`spillway plan`: what these values of the chart mean in bytes, bandwidth and seconds."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, TextIO

from spillway_ctl.plan_arithmetic import FirstToken, Rates, break_even_bytes_per_second, first_token
from spillway_ctl.plan_input import PlannedEngines
from spillway_ctl.plan_ratio import Apart, apart_line
from spillway_ctl.planned_tier import PlannedTier
from spillway_ctl.quantities import format_bytes
from spillway_ctl.run import JSON_FORMAT, OK

_MISSING = "-"


def plan(
    engines: Sequence[PlannedEngines],
    rates: Rates,
    prompts: Sequence[int],
    *,
    as_json: bool,
    apart: Apart | None = None,
    out: TextIO | None = None,
) -> int:
    """Print the figures of every group; a rate that the values give is used if `rates` has none.

    apart: what a trace needs of prefill and of decode engines.
    """
    out = out if out is not None else sys.stdout
    documents = [_document(group, rates, prompts) for group in engines]
    if as_json:
        whole: dict[str, Any] = {"format": JSON_FORMAT, "command": "plan", "engines": documents}
        if apart is not None:
            whole["prefill_and_decode"] = asdict(apart)
        print(json.dumps(whole, indent=2), file=out, flush=True)
    else:
        for document in documents:
            print("\n".join(_lines(document)), file=out, flush=True)
        if apart is not None:
            print(apart_line(apart), file=out, flush=True)
    return OK


def _document(group: PlannedEngines, given: Rates, prompts: Sequence[int]) -> dict[str, Any]:
    rates = given
    if rates.prefill_tokens_per_second is None:
        rates = replace(rates, prefill_tokens_per_second=group.prefill_tokens_per_second)
    if group.shared_tier == "none":
        rates = replace(rates, tier_read_bytes_per_second=None)
    tier = PlannedTier.of(group.memory, group.settings["offload"])
    chunk_tokens = int(group.memory["chunkTokens"])
    prefill = rates.prefill_tokens_per_second
    longest = int(group.settings["model"]["maxLength"])
    bytes_per_token, node_rows = int(group.memory["bytesPerToken"]), _node_rows(group.memory)
    is_below = group.tier_below == "s3"
    has_bucket = is_below or group.shared_tier == "s3"
    fitting = [tokens for tokens in prompts if tokens <= longest]
    firsts = [
        first_token(tokens, tier.read_bytes_per_token((tokens - 1) // chunk_tokens * chunk_tokens), chunk_tokens, rates)
        for tokens in fitting
    ]
    return {
        "name": group.name,
        "model": group.model,
        "memory": group.memory,
        "shared_tier": group.shared_tier,
        "tier_below": group.tier_below,
        "rates": asdict(rates),
        "cpu_tier_tokens": tier.held_tokens(longest),
        "break_even_bytes_per_second": break_even_bytes_per_second(bytes_per_token, prefill) if prefill else None,
        "first_tokens": [asdict(first) for first in firsts],
        **({"node_tier_tokens": tier.held_tokens(longest, node_rows)} if node_rows else {}),
        **(
            {"kv_groups": tier.describe_groups(), "prompts": _prompts(tier, fitting)}
            if tier.number_of_groups > 1
            else {}
        ),
        **({"requests": _requests(fitting, tier, given, is_below)} if has_bucket else {}),
    }


def _prompts(tier: PlannedTier, prompts: Sequence[int]) -> list[dict[str, int]]:
    """Return the sizes of prompts of these lengths in the tiers, which are not in proportion to the lengths."""
    return [
        {
            "prompt_tokens": tokens,
            "stored_bytes_per_token": round(tier.stored_bytes_per_token(tokens)),
            "read_bytes_per_token": round(tier.read_bytes_per_token(tokens)),
            "cpu_tier_tokens": tier.held_tokens(tokens),
        }
        for tokens in prompts
    ]


def _requests(prompts: Sequence[int], tier: PlannedTier, rates: Rates, is_below: bool) -> list[str]:
    """Return the requests of prompts of these lengths to an object store, and their cost at the given prices.

    is_below: it is the tier below another, which is asked for each chunk before it is copied there.
    """
    found = []
    for tokens in prompts:
        chunks, read = tier.stored_chunks(tokens), tier.read_chunks(tokens)
        if not chunks:
            continue
        put, get = rates.put_price_per_million, rates.get_price_per_million
        stored = None if put is None else chunks * (put + ((get or 0.0) if is_below else 0.0))
        loaded = None if get is None else 2 * read * get
        prices = [
            f"{text} {price / 1000:.3g}"
            for text, price in (("stored", stored), ("loaded", loaded))
            if price is not None
        ]
        costs = f"; 1,000 prompts cost {', '.join(prices)}" if prices else ""
        first = f"{chunks:,} HEAD and " if is_below else ""
        found.append(f"{tokens:,} tokens: {first}{chunks:,} PUT stored, {read:,} HEAD and {read:,} GET loaded{costs}")
    return found


def _rows(memory: dict[str, Any]) -> str:
    """Empty if the model has one KV group."""
    groups = int(memory.get("kvGroups", 1))
    return f"rows of {groups} KV groups, each of " if groups > 1 else ""


def _node_rows(memory: dict[str, Any]) -> int:
    return int(memory.get("nodeTierBytes", 0)) // int(memory["cpuRowBytes"])


def _lines(document: dict[str, Any]) -> list[str]:
    memory, rates = document["memory"], document["rates"]
    what = "rows" if _rows(memory) else "chunks"
    rows = [
        ("a token of KV cache", f"{format_bytes(memory['bytesPerToken'])}{_in_dtype(memory)}{_drafter(memory)}"),
        *([("KV groups", document["kv_groups"])] if "kv_groups" in document else []),
        ("a chunk", f"{memory['chunkTokens']:,} tokens, {_rows(memory)}{format_bytes(memory['cpuRowBytes'])}"),
        (
            "CPU tier of a pod",
            f"{format_bytes(memory['cpuTierBytes'])}: {_ranks(memory)}{memory['cpuChunks']:,} {what}, "
            f"{document['cpu_tier_tokens']:,} tokens{' each' if _ranks(memory) else ''}",
        ),
        *(_prompt_row(each) for each in document.get("prompts", ())),
        *_node_tier(memory, document.get("node_tier_tokens", 0)),
        ("shared memory of a pod", format_bytes(memory["sharedMemoryBytes"])),
        (
            "memory of a pod",
            f"{format_bytes(memory['podNeedsBytes'])} needed, limit {format_bytes(memory['memoryLimitBytes'])}",
        ),
        ("shared tier", f"{document['shared_tier']}{_index(memory)}"),
    ]
    if document["tier_below"] != "none":
        rows.append(("tier below it", document["tier_below"]))
    rows += [("requests to the bucket", each) for each in document.get("requests", ())]
    break_even = document["break_even_bytes_per_second"]
    if break_even is None:
        per_thousand = format_bytes(break_even_bytes_per_second(memory["bytesPerToken"], 1000))
        rows.append(("a load beats computing", f"above {per_thousand}/s for every 1,000 tokens/s of prefill"))
    else:
        rows.append(("a load beats computing", f"above {format_bytes(break_even)}/s"))
        rows += _verdicts(break_even, rates)
    rows += _not_judged(rates)
    lines = [f"{document['model']} ({document['name']})"]
    lines += [f"  {name:<24}{text}" for name, text in rows]
    if break_even is not None and document["first_tokens"]:
        lines.append(
            f"  {'prompt':>10} {'computed':>12} {'CPU tier':>12} {'shared tier':>12}   first token, an idle engine"
        )
        for item in document["first_tokens"]:
            first = FirstToken(**item)
            columns = (first.computed_seconds, first.cpu_tier_seconds, first.shared_tier_seconds)
            lines.append(f"  {first.prompt_tokens:>10,} " + " ".join(f"{_seconds(column):>12}" for column in columns))
    return lines


def _verdicts(break_even: float, rates: dict[str, float | None]) -> list[tuple[str, str]]:
    copy, read = rates["device_copy_bytes_per_second"], rates["tier_read_bytes_per_second"]
    rows = []
    if copy:
        rows.append(("CPU tier at this rate", _verdict(copy, break_even)))
    if copy and read:
        # One after the other: the rate of the whole way.
        rows.append(("shared tier at its rate", _verdict(1 / (1 / copy + 1 / read), break_even)))
    return rows


def _not_judged(rates: dict[str, float | None]) -> list[tuple[str, str]]:
    """Rates that were given but are useless without another one."""
    copy, read = rates["device_copy_bytes_per_second"], rates["tier_read_bytes_per_second"]
    if rates["prefill_tokens_per_second"] is None:
        return [("not judged", "the given rates; give --prefill-tokens-per-second too")] if copy or read else []
    return [("not judged", "--tier-rate; give --device-copy-rate too")] if read and not copy else []


def _verdict(rate: float, break_even: float) -> str:
    speed = f"{rate / break_even:.1f} times as fast as computing"
    return speed if rate > break_even else f"{speed}: slower than computing, so it is recomputed"


def _prompt_row(prompt: dict[str, int]) -> tuple[str, str]:
    stored, read = (format_bytes(prompt[f"{what}_bytes_per_token"]) for what in ("stored", "read"))
    return (
        f"prompts of {prompt['prompt_tokens']:,}",
        f"{stored} a token are stored, {read} read by a load; the CPU tier holds {prompt['cpu_tier_tokens']:,} tokens",
    )


def _node_tier(memory: dict[str, Any], tokens: int) -> list[tuple[str, str]]:
    """Return what a node needs for the tier that its engines share, and for how many engines."""
    node = int(memory.get("nodeTierBytes", 0))
    if not node:
        return []
    limit, rows = int(memory["memoryLimitBytes"]), _node_rows(memory)
    each = ", ".join(f"{count} {format_bytes(node + node // 64 + count * limit)}" for count in (1, 4, 8))
    return [
        (
            "CPU tier of a node",
            f"{format_bytes(node)}: {rows:,} {'rows' if _rows(memory) else 'chunks'}, "
            f"{tokens:,} tokens, for all of its engines",
        ),
        ("memory of a node", f"by engines on it: {each}"),
    ]


def _ranks(memory: dict[str, Any]) -> str:
    """Empty if an engine has one engine core."""
    ranks = memory.get("dataParallelRanks", 1)
    return f"{ranks} data parallel ranks x " if ranks > 1 else ""


def _index(memory: dict[str, Any]) -> str:
    """Empty if nothing of the tier's index lies in a pod's memory, or its size is not known before the pod runs."""
    index_bytes = memory.get("tierIndexBytes", 0)
    return f", {format_bytes(index_bytes)} of a pod's memory for its index" if index_bytes else ""


def _in_dtype(memory: dict[str, Any]) -> str:
    return f" in {memory['kvDtype']}" if "kvDtype" in memory else ""


def _drafter(memory: dict[str, Any]) -> str:
    """Empty if the engine does not speculate, or the drafter keeps no KV."""
    layers = int(memory.get("draftLayers", 0))
    return f", a drafter's {layers} layer{'s' if layers > 1 else ''} included" if layers else ""


def _seconds(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.3f} s"
