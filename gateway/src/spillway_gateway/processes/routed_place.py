"""The router's side of one request of a front: its place in its model's queue, its turn, and its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from spillway_gateway.access.admission import Admission
from spillway_gateway.access.session_turns import Session
from spillway_gateway.fleet.attempt import Attempt
from spillway_gateway.fleet.cold_prompts import ColdTurn
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.hand_over import HandOver
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.sessions import SessionKey
from spillway_gateway.processes import messages
from spillway_gateway.routing.prefix import PromptBlocks
from spillway_gateway.upstream.local_router import may_be_sent_again
from spillway_gateway.upstream.suspects import Fingerprint, Suspects


class RoutedPlace:
    """One request of the front, in its model's queue or on an engine."""

    __slots__ = ("_notice", "_whose", "admission", "attempt", "fleet", "hand_over", "turn", "waiting")

    def __init__(self, notice: Callable[..., None], fleet: ModelFleet) -> None:
        """notice: tells the front, once, that an engine went down or ends."""
        self._notice = notice
        self.fleet = fleet
        self.admission: Admission | None = None  # once it was admitted
        self._whose: tuple[str, Session] = "", None
        self.waiting: asyncio.Task[None] | None = None
        self.attempt: Attempt | None = None
        self.turn = ColdTurn()  # of the last choice
        self.hand_over: HandOver | None = None  # of a first leg

    def admitted(self, admission: Admission, asked: messages.Route) -> None:
        self.admission, self._whose = admission, (asked.tenant, asked.session)

    def choose(self, asked: messages.Route, prompt: PromptBlocks) -> Attempt | None:
        """Choose an engine; None: the prompt has to wait for its turn."""
        self.close(None)
        session = SessionKey(asked.tenant, asked.session) if asked.session is not None else None
        tried = frozenset(asked.tried)
        attempt = self.fleet.choose_unless_held(
            prompt, tried, asked.only, session, asked.adapter, turn=self.turn, leg=asked.leg, tenant=asked.tenant
        )
        if attempt is not None:
            self.attempt = attempt
            attempt.engine.requests.add(self)
            if self.admission is not None:
                self.admission.turns.charge(asked.tenant, asked.session, attempt.decision.uncached_tokens)
        return attempt

    def may_be_sent_again(self, asked: messages.Ended, suspects: Suspects) -> bool:
        """Whether the request may be sent again after its engine has ended."""
        fingerprint = Fingerprint(asked.digest, asked.body_bytes)
        return may_be_sent_again(self.fleet, self.attempt, suspects, fingerprint, again=asked.again, begun=asked.begun)

    def close(self, now: float | None) -> None:
        """The attempt, if there is one. now: as Attempt.close()."""
        if self.attempt is not None:
            self.attempt.engine.requests.discard(self)
            self.attempt.close(now)
            self.attempt = None

    def end_hand_over(self) -> None:
        """End that of a first leg, if there was one."""
        if self.hand_over is not None:
            self.hand_over.end()
            self.hand_over = None

    def leave(self) -> None:
        """Release everything. May be called more than once."""
        if self.waiting is not None:
            self.waiting.cancel()
            self.waiting = None
        self.fleet.cold.leave(self.turn)
        self.end_hand_over()
        self.close(None)
        if self.admission is not None:
            self.admission.leave(*self._whose)
            self.admission = None

    # -- fleet.engine.EngineRequest

    def engine_went_down(self, engine: Engine) -> None:
        self._notice(engine, ends=False)

    def engine_ends(self, engine: Engine) -> None:
        self._notice(engine, ends=True)
