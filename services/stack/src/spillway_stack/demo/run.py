"""The demo: each document passes every phase once; the engine's counters are read before and after each request."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from spillway_settings.wire import ENGINE_HEADER
from spillway_stack.demo.asking import Answer, ask, ask_one_token, count_prompt_tokens, is_in_slow_start, take_blocks
from spillway_stack.demo.console import Console
from spillway_stack.demo.document import ENTRIES_MAX, LogBook, conversation, longest_book, write_log_book
from spillway_stack.demo.engine_counters import EngineCounters, read_counters
from spillway_stack.demo.phases import Phase, Sample, attribute
from spillway_stack.demo.report import Row, summarise
from spillway_stack.demo.running_stack import RunningStack
from spillway_stack.demo.sizing import (
    DOCUMENTS,
    PROBES,
    choose_document_tokens,
    probe_tokens,
    prompt_tokens_max,
    short_answers_to_evict,
)
from spillway_stack.errors import StackError

FIRST, OTHER = 0, 1  # engines: one computes, the other never does
DOCUMENT_SEEDS = (0, 1, 3)  # three harbours, three ports
PROBE_SEEDS = (100, 101)  # the first request warms the engine up, the second is measured
COUNTERS_TIMEOUT_SECONDS = 10.0
STORED_TIMEOUT_SECONDS = 60.0
SLOW_START_TIMEOUT_SECONDS = 60.0
POLL_SECONDS = 0.05

assert len(DOCUMENT_SEEDS) == DOCUMENTS
assert len(PROBE_SEEDS) == PROBES


class Demo:
    """Runs the phases in order and reports each row as soon as it is complete."""

    def __init__(self, running: RunningStack, edition: str, console: Console, on_row: Callable[[Row], None]) -> None:
        self._running = running
        self._edition = edition
        self._console = console
        self._on_row = on_row
        self._samples: list[Sample] = []
        self._books: list[LogBook] = []
        self.rows: list[Row] = []
        self.prefill_tokens_per_second = 0.0
        self.document_tokens = 0

    def prepare(self, *, longest: bool) -> None:
        """Measure the prefill rate, choose the length, write the documents.

        Args:
            longest: choose the longest documents that fit the engines, however long computing them takes.
        """
        with self._console.status("measuring how fast this engine computes a prompt"):
            self.prefill_tokens_per_second = self._measure_prefill()
        running = self._running
        self.document_tokens = choose_document_tokens(
            math.inf if longest else self.prefill_tokens_per_second, running.limits, running.shared_tier_bytes
        )
        tokens_max = prompt_tokens_max(self.document_tokens, running.limits)
        with self._console.status(f"writing {DOCUMENTS} log books of {self.document_tokens:,} tokens"):
            self._books = [self._write(seed, tokens_max) for seed in DOCUMENT_SEEDS]

    def run(self) -> None:
        """Run all phases and fill `rows`. Raises StackError when an engine stops answering."""
        written_before = read_counters(self._running.engine_port(FIRST))
        for document in range(DOCUMENTS):
            self._ask(Phase.COLD, document, FIRST)
            # Writing to the tiers would also take cores from the next measurement.
            with self._console.status(
                f"waiting until the {self._running.shared_tier} tier holds document {document + 1}"
            ):
                self._wait_stored(written_before)
            self._ask(Phase.DEVICE_HIT, document, FIRST)
        for phase in (Phase.COLD, Phase.DEVICE_HIT):
            self._finish(phase)

        for document in range(DOCUMENTS):
            with self._console.status(f"asking about other documents until document {document + 1} left the device"):
                self._evict(document)
            self._ask(Phase.CPU_TIER, document, FIRST)
        self._finish(Phase.CPU_TIER)

        self._warm_up(OTHER)
        for document in range(DOCUMENTS):
            self._ask(Phase.OTHER_ENGINE, document, OTHER)
        self._finish(Phase.OTHER_ENGINE)

        with self._console.status("restarting engine-0 with an empty device cache and CPU tier"):
            self._running.stack.restart_engine(FIRST)
        self._warm_up(FIRST)
        for document in range(DOCUMENTS):
            self._ask(Phase.RESTARTED, document, FIRST)
        self._finish(Phase.RESTARTED)

        # Last, because the gateway may send a document to either engine.
        with self._console.status("waiting until the gateway's slow start of engine-0 is over"):
            self._wait_slow_start()
        for document in range(DOCUMENTS):
            self._ask_through_gateway(document)
        self._finish(Phase.GATEWAY)

    @property
    def question(self) -> tuple[str, str]:
        """The first document's question, with the answer that was given cold."""
        return self._books[0].question, self._samples[0].answer.text.strip()

    @property
    def books(self) -> Sequence[LogBook]:
        return self._books

    # Steps

    def _measure_prefill(self) -> float:
        rate = 0.0
        tokens = probe_tokens(self._running.limits)
        for seed in PROBE_SEEDS:
            book = self._write(seed, tokens)
            answer = ask(self._running.engine_port(FIRST), self._running.model, conversation(book))
            rate = answer.prompt_tokens / answer.ttft_seconds
        return rate

    def _write(self, seed: int, tokens_max: int) -> LogBook:
        def count(book: LogBook) -> int:
            return count_prompt_tokens(self._running.engine_port(FIRST), self._running.model, conversation(book))

        book = write_log_book(seed, self._edition, ENTRIES_MAX)
        try:
            return longest_book(book, tokens_max, count)
        except ValueError as error:
            raise StackError(f"no log book fits into {tokens_max} tokens: {error}") from error

    def _ask(self, phase: Phase, document: int, engine: int) -> None:
        name = self._running.stack.engines[engine].name
        port = self._running.engine_port(engine)
        with self._console.status(f"{phase.value}: asking {name} about document {document + 1} of {DOCUMENTS}"):
            before = read_counters(port)
            answer = self._question(port, document)
            self._keep(phase, document, engine, answer, before)

    def _ask_through_gateway(self, document: int) -> None:
        """Ask twice: the first request brings the document to the device of the engine that the gateway chooses, the
        second should be routed there. The engine's name is in the response headers."""
        running = self._running
        with self._console.status(f"{Phase.GATEWAY.value}: asking about document {document + 1} of {DOCUMENTS}"):
            self._question(running.gateway_port, document)
            before = [read_counters(running.engine_port(index)) for index in range(len(running.stack.engines))]
            answer = self._question(running.gateway_port, document)
            engine = running.engine_index(answer.headers.get(ENGINE_HEADER, ""))
            self._keep(Phase.GATEWAY, document, engine, answer, before[engine])

    def _question(self, port: int, document: int) -> Answer:
        return ask(port, self._running.model, conversation(self._books[document]))

    def _keep(self, phase: Phase, document: int, engine: int, answer: Answer, before: EngineCounters) -> None:
        delta = self._counted_since(before, engine, answer.prompt_tokens)
        served = attribute(delta, self._running.limits)
        name = self._running.stack.engines[engine].name
        self._samples.append(Sample(phase, document, name, answer, delta, served))

    def _counted_since(self, before: EngineCounters, engine: int, prompt_tokens: int) -> EngineCounters:
        """Poll: counters reach the API server's process after the answer."""
        deadline = time.monotonic() + COUNTERS_TIMEOUT_SECONDS
        while True:
            delta = read_counters(self._running.engine_port(engine)).since(before)
            if delta.prompt_tokens >= prompt_tokens or time.monotonic() > deadline:
                return delta
            time.sleep(POLL_SECONDS)

    def _finish(self, phase: Phase) -> None:
        row = summarise(self._of(phase), self._samples, self._running.limits, self._running.shared_tier)
        self.rows.append(row)
        self._on_row(row)

    def _of(self, phase: Phase) -> list[Sample]:
        return [sample for sample in self._samples if sample.phase is phase]

    def _wait_stored(self, before: EngineCounters) -> None:
        """Wait until the shared tier holds every whole chunk of the documents asked so far.

        A dropped store is no reason to stop: the phases that miss it report it.
        """
        limits, port = self._running.limits, self._running.engine_port(FIRST)
        due_tokens = sum(limits.reusable_tokens(sample.answer.prompt_tokens) for sample in self._of(Phase.COLD))
        due_bytes = due_tokens * limits.bytes_per_token
        deadline = time.monotonic() + STORED_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            # An idle engine reports nothing; each small request makes it take a step.
            ask_one_token(port, self._running.model)
            written = read_counters(port).since(before).tier_written_bytes
            if written.get(self._running.shared_tier, 0) >= due_bytes:
                return
            time.sleep(POLL_SECONDS)

    def _evict(self, document: int) -> None:
        """Other documents first, then as many one-block answers as the device cache has older blocks."""
        for other in range(DOCUMENTS):
            if other != document:
                self._question(self._running.engine_port(FIRST), other)
        document_blocks = self.document_tokens // self._running.limits.block_size
        blocks = short_answers_to_evict(document_blocks, self._running.limits)
        take_blocks(self._running.engine_port(FIRST), self._running.model, blocks)

    def _wait_slow_start(self) -> None:
        """Wait for it: until then the gateway may prefer the other engine to one that has a document on its device."""
        deadline = time.monotonic() + SLOW_START_TIMEOUT_SECONDS
        while time.monotonic() < deadline and is_in_slow_start(self._running.gateway_port):
            time.sleep(POLL_SECONDS)

    def _warm_up(self, engine: int) -> None:
        """The first requests of a process load libraries; that time is not a tier's."""
        port = self._running.engine_port(engine)
        with self._console.status(f"warming up {self._running.stack.engines[engine].name} with another document"):
            for seed in PROBE_SEEDS:
                book = write_log_book(seed, f"{self._edition}-{len(self.rows)}", entries=3)
                ask(port, self._running.model, conversation(book))
