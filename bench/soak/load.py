"""Clients in a closed loop: every answer is compared with its reference, every failure with the faults of its time."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import httpx
from reference_answers.margins import Scored, compared_tokens

from soak.asking import REQUEST_SECONDS, Failure, Reply, ask_engine, ask_gateway, request_body
from soak.outages import GATEWAY, Outages
from soak.references import Reference

CLOSED_SECONDS = 0.1  # between checks while every target is closed
TEXTS_MOST = 50  # of wrong answers and failures that are kept in full
INJECTED_AT = 10  # number of the answer whose reference --inject-wrong spoils


@dataclass
class Tally:
    """Outcomes of the clients' requests. Changed under `lock` alone; read when the clients have ended."""

    answers: int = 0
    wrong: int = 0
    checked_tokens: int = 0
    by_route: Counter[str] = field(default_factory=Counter)
    by_cached: Counter[str] = field(default_factory=Counter)  # none, part, whole
    unrecorded_lengths: int = 0  # answers at a cached length that no reference was recorded at; checked all the same
    excused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, text: str) -> None:
        if len(self.texts) < TEXTS_MOST:
            self.texts.append(text)


def new_client() -> httpx.Client:
    """A connection per request: a server may close an idle one in the moment in which it is used again, and that would
    look like a request that failed for no reason."""
    return httpx.Client(timeout=REQUEST_SECONDS, limits=httpx.Limits(max_keepalive_connections=0))


class Load:
    """engines: name -> URL. gateway_url None: engines are asked directly, all of the time."""

    def __init__(
        self,
        references: tuple[Reference, ...],
        engines: Mapping[str, str],
        gateway_url: str | None,
        model: str,
        outages: Outages,
        *,
        seed: int,
        clients: int,
        inject_wrong: bool = False,
    ) -> None:
        self.tally = Tally()
        self._references, self._engines, self._gateway_url = references, engines, gateway_url
        self._model, self._outages = model, outages
        self._spoil_at = INJECTED_AT if inject_wrong else 0
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._client, args=(random.Random(f"{seed} client {number}"),), daemon=True)
            for number in range(clients)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Lets every request end. Raises AssertionError when one outlives its own deadline."""
        self._stop.set()
        deadline = time.monotonic() + REQUEST_SECONDS + 30.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in self._threads), "a client never came back from a request"

    def ask(self, client: httpx.Client, reference: Reference, target: str) -> bool:
        """One request to an engine by name, or to the gateway; judged here. True when there was an answer."""
        body = request_body(self._model, reference.prompt.tokens, reference.salt)
        begun = time.monotonic()
        if not self._outages.is_open(target):
            return False
        if target == GATEWAY:
            assert self._gateway_url is not None
            outcome = ask_gateway(client, self._gateway_url, body)
        else:
            outcome = ask_engine(client, self._engines[target], target, body)
        ended = time.monotonic()
        with self.tally.lock:
            self.tally.seconds.append(ended - begun)
            if isinstance(outcome, Reply):
                self._judge_answer(reference, outcome, target)
            else:
                self._judge_failure(reference, outcome, target, begun, ended)
        return isinstance(outcome, Reply)

    def _client(self, chance: random.Random) -> None:
        with new_client() as client:
            while not self._stop.is_set():
                target = self._choose(chance)
                if target is None:
                    self._stop.wait(CLOSED_SECONDS)
                    continue
                self.ask(client, chance.choice(self._references), target)

    def _choose(self, chance: random.Random) -> str | None:
        """Half of the requests go through the gateway, the others to whichever engine is there."""
        targets = self._outages.open_targets()
        engines = [target for target in targets if target != GATEWAY]
        if GATEWAY in targets and (not engines or chance.random() < 0.5):
            return GATEWAY
        return chance.choice(engines) if engines else None

    def _judge_answer(self, reference: Reference, reply: Reply, target: str) -> None:
        tally = self.tally
        tally.answers += 1
        if tally.answers == self._spoil_at:
            reference = replace(reference, scored=_another(reference.scored))
        tally.by_route[target if target == GATEWAY else "direct"] += 1
        tally.checked_tokens += compared_tokens(reference.scored, reply.scored)
        whole = reference.prompt.reusable_tokens
        tally.by_cached["none" if not reply.cached_tokens else "whole" if reply.cached_tokens == whole else "part"] += 1
        tally.unrecorded_lengths += reply.cached_tokens not in reference.lengths
        if (fault := reference.fault(reply.scored)) is not None:
            tally.wrong += 1
            tally.note(
                f"WRONG ANSWER {reference.prompt.name}, {reply.cached_tokens} tokens cached, from {reply.engine} by "
                f"{target}: {fault}; {reply.scored.tokens}, the reference is {reference.scored.tokens}"
            )

    def _judge_failure(self, reference: Reference, failure: Failure, target: str, begun: float, ended: float) -> None:
        excuse = self._excuse(failure, target, begun, ended)
        if excuse is not None:
            self.tally.excused[excuse] += 1
            return
        self.tally.failed[failure.reason] += 1
        self.tally.note(f"FAILED {reference.prompt.name} by {target}, {begun:.1f} to {ended:.1f}: {failure}")

    def _excuse(self, failure: Failure, target: str, begun: float, ended: float) -> str | None:
        """Return the fault that excuses a failure: the request was in flight on a process that was killed. Behind the
        gateway that counts only from the first token on, and only with an error event: before it another engine must
        have answered."""
        if target != GATEWAY:
            return self._outages.excuse(target, begun, ended)
        gateway = self._outages.excuse(GATEWAY, begun, ended)
        if gateway is not None:
            return gateway
        if failure.engine is None or not failure.tokens or not failure.explained:
            return None
        return self._outages.excuse(failure.engine, begun, ended, routed=True)


def _another(answer: Scored) -> Scored:
    """Copy the answer with a first token that is not the model's."""
    other = answer.tokens[0] ^ 1
    return Scored((other, *answer.tokens[1:]), ({other: 0.0}, *answer.tops[1:]))
