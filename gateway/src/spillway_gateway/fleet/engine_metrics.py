"""The series of an engine's /metrics page that routing reads: requests of other senders, and measured rates.

A page has hundreds of lines and is read every second, so only the wanted names are parsed. A data-parallel engine
has one line per rank, distinguished by the label `engine`. If the ranks are routed to one by one, each has a reading
of its own lines. Else requests, rates and totals add up, and the fullest rank is the KV cache usage.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import NamedTuple

from spillway_gateway.fleet.prefill_rate import usable_rate
from spillway_settings.wire import STORE_TYPES

PAGE_BYTES_MAX = 4 * 1024 * 1024
SAMPLES_MAX = 2048  # of the names that are read; an engine of 64 ranks has about ten for each
STEP_BYTES = 64 * 1024  # about a millisecond
LINE_BYTES_MAX = 4096
LINES_BYTES_MAX = 512 * 1024  # of all samples that are read; 64 ranks have some 200 KB
RANKS_MAX = 256
_WANTED = re.compile(
    rb"^(?:vllm:(?:num_requests_(?:waiting|running)|kv_cache_usage_perc|external_prefix_cache_hits_total"
    rb"|cache_config_info|(?:prompt|generation)_tokens_total|inter_token_latency_seconds_(?:sum|count))|spillway_(?:prefill_tokens_per_second|device_copy_(?:seconds|bytes)_total"
    rb"|tier_(?:load_bytes_per_second|loads_pay|read_bytes_total|written_bytes_total)))[{ ][^\n]*",
    re.MULTILINE,
)
_BLOCK_TOKENS = re.compile(rb'[{,]block_size="(\d{1,9})"')
_RANK = re.compile(rb'[{,]engine="(\d{1,4})"')
_BLOCKS = re.compile(rb'[{,]num_gpu_blocks="(\d{1,12})"')


class EngineReading(NamedTuple):
    """One page. None: the page does not have it, or nothing was measured yet. Rates in tokens per second."""

    waiting_requests: int = 0
    running_requests: int = 0
    kv_usage: float | None = None  # 0..1
    kv_capacity_tokens: int | None = None
    prefill_tokens_per_second: float | None = None
    cpu_load_tokens_per_second: float | None = None
    shared_load_tokens_per_second: float | None = None  # of the nearest shared tier
    below_load_tokens_per_second: float | None = None  # of the one behind it
    computed_tokens: float | None = None  # of prompts and answers, since its start
    token_intervals: float = 0.0  # between two tokens of an answer, since its start
    token_seconds: float = 0.0  # all of them together
    declined_tiers: frozenset[str] = frozenset()  # types of shared tiers that loads do not pay from, by its own gates


def wanted_lines(page: bytes) -> Generator[None, None, bytes]:
    """The lines of the page that its readers look for, about SAMPLES_MAX or LINES_BYTES_MAX at most. A page may have
    megabytes, so it is searched in steps. Pure."""
    lines: list[bytes] = []
    at = lines_bytes = 0
    while at < len(page) and len(lines) < SAMPLES_MAX and lines_bytes < LINES_BYTES_MAX:
        end = page.rfind(b"\n", at, at + STEP_BYTES) + 1
        if not end:  # within a long line, which is none that is looked for
            end = page.find(b"\n", at) + 1 or len(page)
            piece = page[at : at + STEP_BYTES]
        else:
            piece = page[at:end]
        found = [line for line in _WANTED.findall(piece) if len(line) <= LINE_BYTES_MAX]
        lines += found
        lines_bytes += sum(map(len, found))
        at = end
        yield
    return b"\n".join(lines[:SAMPLES_MAX])


class PagesOfRanks:
    """A page as each data parallel rank would show it; a sample without a rank is on each of them. vLLM shows gauges of
    all ranks from its start, so a rank that is absent does not exist. One rank's page is built when it is asked for:
    all of them together may be a hundred times as long as the engine's."""

    def __init__(self, page: bytes) -> None:
        self._common: list[bytes] = []
        self._lines: dict[int, list[bytes]] = {}
        for line in page.split(b"\n"):
            if not line.startswith(b"#"):
                rank = _RANK.search(line)
                if rank is None:
                    self._common.append(line)
                elif int(rank[1]) < RANKS_MAX:
                    self._lines.setdefault(int(rank[1]), []).append(line)

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(self._lines)

    def of(self, rank: int) -> bytes:
        """Return the page of one rank; empty if the engine does not have that rank."""
        own = self._lines.get(rank)
        return b"" if own is None else b"\n".join([*self._common, *own])


def read_metrics(page: bytes) -> EngineReading:
    """Parse a page in Prometheus' text format; absent samples and samples that are no number are left out. Pure."""
    page = b"\n" + page
    waiting = _values(page, b"vllm:num_requests_waiting")
    running = _values(page, b"vllm:num_requests_running")
    usage = _values(page, b"vllm:kv_cache_usage_perc")
    prefill = _values(page, b"spillway_prefill_tokens_per_second")
    computed = [
        *_values(page, b"vllm:prompt_tokens_total"),
        *_values(page, b"vllm:generation_tokens_total"),
    ]
    bytes_per_token = _bytes_per_token(page)
    cpu = shared = below = None
    if bytes_per_token is not None:
        seconds = sum(_values(page, b"spillway_device_copy_seconds_total", b'direction="load"'))
        if seconds > 0:
            cpu = _loaded_bytes(page) / seconds / bytes_per_token
        shared, below = (None if rate is None else rate / bytes_per_token for rate in _link_rates(page))
    return EngineReading(
        waiting_requests=_count(waiting),
        running_requests=_count(running),
        kv_usage=min(1.0, max(0.0, *usage)) if usage else None,
        kv_capacity_tokens=_kv_capacity(page),
        prefill_tokens_per_second=usable_rate(sum(prefill)),
        cpu_load_tokens_per_second=usable_rate(cpu),
        shared_load_tokens_per_second=usable_rate(shared),
        below_load_tokens_per_second=usable_rate(below),
        computed_tokens=sum(computed) if computed else None,
        token_intervals=sum(_values(page, b"vllm:inter_token_latency_seconds_count")),
        token_seconds=sum(_values(page, b"vllm:inter_token_latency_seconds_sum")),
        declined_tiers=frozenset(
            kind for kind in STORE_TYPES if max(_of_tier(page, b"loads_pay", kind), default=1) == 0
        ),
    )


def _kv_capacity(page: bytes) -> int | None:
    """Tokens of one rank's KV cache; ranks are alike."""
    at = page.find(b"vllm:cache_config_info{")
    line = page[at : page.find(b"\n", at)] if at >= 0 else b""
    block_tokens, blocks = _BLOCK_TOKENS.search(line), _BLOCKS.search(line)
    return int(block_tokens[1]) * int(blocks[1]) or None if block_tokens and blocks else None


def _bytes_per_token(page: bytes) -> float | None:
    """Every token found below the device was copied to it, so the two totals give the size of one."""
    tokens = sum(_values(page, b"vllm:external_prefix_cache_hits_total"))
    size = _loaded_bytes(page) / tokens if tokens > 0 else 0.0
    return size if 0 < size < float("inf") else None


def _link_rates(page: bytes) -> tuple[float | None, float | None]:
    """Bytes per second of loads from the nearest shared tier and from the one behind it, by the fastest rank."""
    found = [max(_of_tier(page, b"load_bytes_per_second", kind), default=None) for kind in STORE_TYPES]
    rates = [rate for rate in found if rate is not None]
    if len(rates) > 1:
        return rates[0], rates[1]
    return max(_values(page, b"spillway_tier_load_bytes_per_second"), default=None), None


def _of_tier(page: bytes, name: bytes, kind: str) -> list[float]:
    return _values(page, b"spillway_tier_" + name, b'tier="%s"' % kind.encode())


def _loaded_bytes(page: bytes) -> float:
    return sum(_values(page, b"spillway_device_copy_bytes_total", b'direction="load"'))


def _count(values: list[float]) -> int:
    return int(min(max(0.0, sum(values)), 1e9))


def _values(page: bytes, name: bytes, label: bytes = b"") -> list[float]:
    """Finite values of the samples of exactly this name whose labels contain `label`."""
    values: list[float] = []
    at = page.find(b"\n" + name)
    while at >= 0:
        end = page.find(b"\n", at + 1)
        rest = page[at + 1 + len(name) : end if end >= 0 else len(page)]
        if rest[:1] in (b"{", b" ") and label in rest:
            fields = rest.rpartition(b"}")[2].split()
            try:
                value = float(fields[0])
            except (IndexError, ValueError):
                value = float("nan")
            if abs(value) < float("inf"):  # false for not-a-number too
                values.append(value)
        at = page.find(b"\n" + name, at + 1)
    return values
