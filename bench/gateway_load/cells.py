"""The measurements of one router: a cell per concurrency, plain and streamed; many streams with probes; memory."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import subprocess
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gateway_load.load_generator import Measured, generate_load, requests_of
from gateway_load.processes import cost, end_probing, probed_by, start_probing
from gateway_load.prompts import distinct_bodies, make_prompts, traffic
from gateway_load.texts import Texts

CONCURRENT = (1, 64, 512)
WARM_SECONDS = {1: 0.7, 64: 1.0, 512: 2.0}  # by requests at once; then most chats have begun


@dataclass(frozen=True, slots=True)
class Cell:
    """One router at one concurrency. Milliseconds; CPU of the router alone, None if nothing was counted."""

    requests_per_second: float
    p50_ms: float
    p99_ms: float
    first_event_p50_ms: float | None
    first_event_p99_ms: float | None
    events_per_second: float | None
    cpu_seconds_per_1000_requests: float | None
    cpu_seconds_per_100000_events: float | None
    cpu_cores: float | None
    rss_mb: float | None
    failures: int
    first_failure: str


class Load:
    """Prompts made once, so every router sees the same but for their numbers. concurrent, streams: the cells, by
    requests at once and by whether they stream."""

    def __init__(self, texts: Texts, concurrent: Sequence[int], streams: Sequence[bool]) -> None:
        self.concurrent = concurrent
        self.streams = streams
        prompts = make_prompts(texts)
        self._texts = texts
        self._prompts = {False: prompts, True: prompts.streamed()}
        self._numbers = itertools.count(1)  # never repeated in a run, so no round finds prompts of another one cached

    def bodies(self, *, stream: bool, concurrent: int) -> Iterator[bytes]:
        """Endless."""
        return traffic(self._prompts[stream], self._numbers, concurrent=concurrent)

    def distinct(self) -> Iterator[bytes]:
        """Bodies that share no block, endless."""
        return distinct_bodies(self._texts)

    async def cell(
        self,
        ports: Sequence[int],
        process: subprocess.Popen[bytes] | None,
        *,
        stream: bool,
        concurrent: int,
        seconds: float,
        key: str | None = None,
    ) -> Cell:
        """process: of the router; None measures the engines themselves."""
        requests = requests_of(self.bodies(stream=stream, concurrent=concurrent), ports[0], key)
        costs = []

        def note() -> None:
            if process is not None:
                costs.append(cost(process))

        measured = await generate_load(
            ports,
            requests,
            stream=stream,
            concurrent=concurrent,
            warm_seconds=WARM_SECONDS[concurrent],
            seconds=seconds,
            at_start=note,
            at_end=note,
        )
        cpu = costs[1].cpu_seconds - costs[0].cpu_seconds if costs else None
        return _cell(measured, stream, cpu, costs[1].rss_bytes if costs else None)


def _cell(measured: Measured, stream: bool, cpu: float | None, rss: int | None) -> Cell:
    count = len(measured.whole)
    return Cell(
        requests_per_second=count / measured.seconds,
        p50_ms=_percentile_ms(measured.whole, 50),
        p99_ms=_percentile_ms(measured.whole, 99),
        first_event_p50_ms=_percentile_ms(measured.first_event, 50) if stream else None,
        first_event_p99_ms=_percentile_ms(measured.first_event, 99) if stream else None,
        events_per_second=measured.events / measured.seconds if stream else None,
        cpu_seconds_per_1000_requests=1_000 * cpu / count if cpu is not None and count else None,
        cpu_seconds_per_100000_events=100_000 * cpu / measured.events if cpu is not None and measured.events else None,
        cpu_cores=cpu / measured.seconds if cpu is not None else None,
        rss_mb=rss / 1e6 if rss is not None else None,
        failures=measured.failures,
        first_failure=measured.first_failure,
    )


def _percentile_ms(seconds: array[float], percent: int) -> float:
    if not seconds:
        return float("nan")
    ordered = sorted(seconds)
    return 1000 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


@dataclass(frozen=True, slots=True)
class Probed:
    """timer_late_ms: the largest delay of the prober's timer, which the slowest probe may include."""

    streams: int
    probes: int
    failed_probes: int
    slowest_probe_ms: float
    timer_late_ms: float
    failures: int
    first_failure: str


async def many_streams(
    bodies: Iterator[bytes],
    port: int,
    targets: Mapping[str, str],
    *,
    streams: int,
    seconds: float,
    key: str | None = None,
) -> dict[str, Probed]:
    """Streams at once, and probes of each target beside them. targets: name -> PORT/PATH."""
    prober: list[subprocess.Popen[str]] = []
    try:
        measured = await generate_load(
            [port],
            requests_of(bodies, port, key),
            stream=True,
            concurrent=streams,
            warm_seconds=0.5,
            seconds=seconds,
            at_start=lambda: prober.append(start_probing(list(targets.values()))),
            at_end=lambda: end_probing(prober[0]),
        )
        probed = await asyncio.to_thread(probed_by, prober[0])
    finally:
        for process in prober:
            process.kill()
            process.wait()
    return {
        name: Probed(
            streams,
            len(times),
            failed,
            1000 * max(times, default=0.0),
            1000 * late,
            measured.failures,
            measured.first_failure,
        )
        for name, (times, failed, late) in zip(targets, probed, strict=True)
    }


@dataclass(frozen=True, slots=True)
class Memory:
    """RSS after each tenth of the prompts. growth: from the half to the end, as a share of the half's."""

    prompts: int
    rss_mb: list[float]
    failures: int

    @property
    def growth(self) -> float:
        half = statistics.median(self.rss_mb[4:6])
        return self.rss_mb[-1] / half - 1.0


async def distinct_prompts(
    port: int,
    process: subprocess.Popen[bytes],
    bodies: Iterator[bytes],
    *,
    prompts: int,
    on_tenth: Callable[[float], None],
) -> Memory:
    """Send `prompts` of the bodies, which share no block, on 16 connections. on_tenth: called with the resident MB."""
    rss: list[float] = []
    failures = 0
    for tenth in range(10):
        count = prompts * (tenth + 1) // 10 - prompts * tenth // 10
        failures += await _send_all(requests_of(itertools.islice(bodies, count), port), port)
        rss.append(cost(process).rss_bytes / 1e6)
        on_tenth(rss[-1])
    return Memory(prompts, rss, failures)


async def _send_all(requests: Iterator[bytes], port: int) -> int:
    """Number of failures."""
    failures = 0

    async def client() -> None:
        nonlocal failures
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for request in requests:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            lower = head.lower()
            at = lower.index(b"content-length:") + 15
            await reader.readexactly(int(lower[at : lower.index(b"\r\n", at)]))
            failures += not head.startswith(b"HTTP/1.1 200")
        writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(client())
    return failures
