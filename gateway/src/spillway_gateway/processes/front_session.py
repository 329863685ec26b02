"""The router's side of one front: its questions, its reports, and what has to be released when it ends."""

from __future__ import annotations

import asyncio
import logging
import socket
from array import array
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from msgspec import structs
from starlette.types import ASGIApp
from starlette.types import Message as AsgiMessage

from spillway_gateway.access.admission import Admission
from spillway_gateway.access.keys import Priority
from spillway_gateway.access.limits import NOTHING_OWED, Settlement
from spillway_gateway.app import Gateway
from spillway_gateway.errors import GatewayError, ModelNotFound
from spillway_gateway.fleet.cold_prompts import ColdTurn
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.hand_over import HandOver
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.sessions import SessionKey
from spillway_gateway.fleet.stored_responses import Owner
from spillway_gateway.fleet.waiting_prompt import WaitingPrompt
from spillway_gateway.processes import messages
from spillway_gateway.processes.channel import Channel
from spillway_gateway.processes.messages import EngineFault, FamilySamples, Kind, Message, from_front
from spillway_gateway.processes.routed_place import RoutedPlace
from spillway_gateway.processes.state_publisher import StatePublisher
from spillway_gateway.routing.fleet_view import Leg
from spillway_gateway.routing.prefix import PromptBlocks
from spillway_gateway.turns import Turns
from spillway_gateway.upstream.local_router import LocalRouter
from spillway_gateway.upstream.router import Admitted

logger = logging.getLogger(__name__)

KEY = "Q"  # of an array of block hashes
RELEASED_PER_ITERATION = 64  # requests of a front that has ended
OWNER_LOOKS_MAX = 64
_QUESTIONS = (messages.Route, messages.Begin, messages.FindOwner, messages.Operator, messages.Ended)


class FrontSession:
    """Serves one front. On the event loop.

    Args:
        gateway: the models and engines.
        router: routes and counts for all fronts.
        publisher: tells fronts the state of engines.
        operators: the application of operators' routes, which asks for their keys.
        turns: the turns of the messages of all fronts.
        on_listening: called when the front accepts connections.
        on_closed: called when the front has ended, and everything of it is released.
    """

    def __init__(
        self,
        gateway: Gateway,
        router: LocalRouter,
        publisher: StatePublisher,
        operators: ASGIApp,
        turns: Turns,
        *,
        on_listening: Callable[[], None],
        on_closed: Callable[[FrontSession], None],
    ) -> None:
        self._gateway = gateway
        self._router = router
        self._publisher = publisher
        self._operators = operators
        self._turns = turns
        self._on_listening = on_listening
        self._on_closed = on_closed
        self._places: dict[int, RoutedPlace] = {}
        self._admitted: dict[int, Admitted] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._noticed: set[tuple[int, bool]] = set()  # in this iteration
        self._counted: dict[int, asyncio.Event] = {}
        self._questions = 0
        self.counts: FamilySamples = {}
        self.ended = asyncio.Event()
        self._heard = False
        self._channel: Channel | None = None  # None: not connected yet
        self._handlers: dict[type[Message], Callable[[Any], object]] = {
            messages.Route: self._route,
            messages.Report: self._report,
            messages.Begin: lambda asked: self._spawn(asked.number, self._begin(asked)),
            messages.Settle: self._settle,
            messages.EngineFaultReport: self._report_fault,
            messages.Noted: self._note,
            messages.Cached: lambda said: router.count_cached(said.model, said.expected, said.cached),
            messages.OwnResponse: lambda said: router.record_response(
                said.response, Owner(said.tenant, said.model, said.engine)
            ),
            messages.ResponseTokens: lambda said: router.set_response_tokens(said.response, said.tenant, said.tokens),
            messages.FindOwner: lambda asked: self._spawn(asked.number, self._find_owner(asked)),
            messages.Operator: lambda asked: self._spawn(asked.number, self._operator(asked)),
            messages.Counts: self._take_counts,
            messages.Ended: self._ended,
            messages.Listening: lambda said: self._on_listening(),
        }

    async def connect(self, front: socket.socket) -> None:
        """front: one end of a socket pair, which the session then owns."""
        self._channel = await Channel.over(front, from_front, self._received, self._closed, self._turns)

    def _received(self, message: Message) -> None:
        self._heard = True
        try:
            self._handlers[type(message)](message)
        except Exception:
            if isinstance(message, _QUESTIONS):
                self._fail(message.number)
            raise

    def has_spoken(self) -> bool:
        """Whether the front has said something since this was asked last."""
        heard, self._heard = self._heard, False
        return heard

    def send(self, message: Message) -> None:
        """A front that takes nothing is ended: it would take the memory of all."""
        channel = self._channel
        if channel is None or channel.closed:
            return
        if channel.full:
            logger.error("a front process does not read; it is ended")
            channel.abort()
            return
        channel.send(message)

    def _closed(self) -> None:
        for counted in self._counted.values():
            counted.set()
        self._releasing = asyncio.create_task(self._release())

    async def _release(self) -> None:
        """The front has ended: release its requests, a few in each iteration of the event loop. Those that wait are the
        first, so that none of them gets the place of one that ran."""
        places = sorted(self._places.values(), key=lambda place: place.waiting is None)
        releases: list[Callable[[], object]] = [place.leave for place in places]
        releases += [task.cancel for task in self._tasks]
        releases += [partial(admitted.end, NOTHING_OWED) for admitted in self._admitted.values()]
        for number, release in enumerate(releases, 1):
            try:
                release()
            except Exception:  # of one request; the others are released all the same
                logger.exception("between processes: a request of a front that has ended was not released")
            if number % RELEASED_PER_ITERATION == 0:
                await asyncio.sleep(0)
        self._places.clear()
        self._admitted.clear()
        self._on_closed(self)
        self.ended.set()

    def _spawn(self, number: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do what answers the question of this number."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, number))
        return task

    def _done(self, number: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("between processes: a question was not answered", exc_info=task.exception())
            self._fail(number)

    def _fail(self, number: int) -> None:
        """Answer a question that could not be answered: the front waits for an answer as long as its client does."""
        self._drop(number)
        self._refuse(number, GatewayError("The gateway failed on this request"))

    def _refuse(self, number: int, error: GatewayError) -> None:
        self.send(messages.Refused(number, type(error).__name__, error.message, error.retry_after_seconds))

    # -- requests ----------------------------------------------------------------------------------------------------

    def _route(self, asked: messages.Route) -> None:
        prompt = _prompt(asked)
        place = self._places.get(asked.number)
        if not asked.first:
            if place is not None:
                self._choose(place, asked, prompt)
            return
        try:
            admission = self._router.admission(asked.model)
            fleet = next(fleet for fleet in self._gateway.fleets if fleet.name == asked.model)
        except ModelNotFound as error:
            self._refuse(asked.number, error)
            return
        place = self._places[asked.number] = RoutedPlace(self.notice, fleet)
        if admission.enter_at_once(asked.tenant, asked.session, asked.priority):
            place.admitted(admission, asked)
            self._choose(place, asked, prompt)
        else:
            place.waiting = self._spawn(asked.number, self._wait(place, admission, fleet, asked, prompt))

    async def _wait(
        self, place: RoutedPlace, admission: Admission, fleet: ModelFleet, asked: messages.Route, prompt: PromptBlocks
    ) -> None:
        if asked.hints and asked.adapter is None:
            session = SessionKey(asked.tenant, asked.session) if asked.session is not None else None
            decision = fleet.expected_choice(prompt, asked.only, session, asked.tenant)
            if decision is not None and decision.held.shared_tokens:
                self._publisher.publish_engine(fleet.engines[decision.engine_name])
                self.send(messages.Waiting(asked.number, decision.engine_name, decision.held.total_tokens))
        try:
            waiting = WaitingPrompt(fleet, prompt, asked.only, admission.requests_per_engine_max)
            await admission.enter(asked.tenant, asked.priority, waiting.tokens_at_hand, asked.session)
        except GatewayError as error:
            place.waiting = None
            self._drop(asked.number)
            self._refuse(asked.number, error)
            return
        place.waiting = None
        place.admitted(admission, asked)
        self._choose(place, asked, prompt)

    def _choose(self, place: RoutedPlace, asked: messages.Route, prompt: PromptBlocks) -> None:
        place.fleet.cold.leave(place.turn)
        place.turn = ColdTurn(urgent=asked.priority is Priority.HIGH)
        after = place.hand_over if asked.leg is Leg.SECOND else None
        if after is None:
            place.end_hand_over()
            if self._choose_unless_held(place, asked, prompt):
                return
        place.waiting = self._spawn(asked.number, self._choose_later(place, asked, prompt, after))

    async def _choose_later(
        self, place: RoutedPlace, asked: messages.Route, prompt: PromptBlocks, after: HandOver | None
    ) -> None:
        """after: the hand-over of the first leg; None: the prompt has to wait for its turn."""
        if after is not None:
            place.close(None)  # the first leg
            await after.arrived(place.fleet.disaggregation.hand_over_seconds_max)
            place.end_hand_over()
        else:
            await place.fleet.cold.wait(place.turn)
        while not self._choose_unless_held(place, asked, prompt):
            await place.fleet.cold.wait(place.turn)
        place.waiting = None

    def _choose_unless_held(self, place: RoutedPlace, asked: messages.Route, prompt: PromptBlocks) -> bool:
        """Answer the front. False: the prompt has to wait for its turn."""
        try:
            attempt = place.choose(asked, prompt)
        except GatewayError as error:
            place.waiting = None  # this task, if it has waited
            place.fleet.cold.leave(place.turn)
            if asked.first:
                self._drop(asked.number)
            self._refuse(asked.number, error)
            return True
        if attempt is None:
            return False
        decision = attempt.decision
        self._router.decided(asked.model, asked.request_id, decision, asked.tried)
        self._publisher.publish_engine(attempt.engine)
        loading = place.fleet.loading_engine(decision)
        if loading is not None:
            self._begin_hand_over(place, asked, prompt, loading)
        if not asked.detailed:
            decision = structs.replace(decision, candidates=())
        self.send(messages.Routed(asked.number, decision, attempt.expected_prefill_seconds))
        return True

    def _begin_hand_over(
        self, place: RoutedPlace, asked: messages.Route, prompt: PromptBlocks, decode_engine: str
    ) -> None:
        def tell(first: int) -> None:
            if asked.hints and asked.adapter is None:
                self.send(messages.Waiting(asked.number, decode_engine, first))

        place.hand_over = place.fleet.hand_over(prompt, decode_engine, tell)

    def _ended(self, asked: messages.Ended) -> None:
        place = self._places.get(asked.number)
        resend = place is not None and place.may_be_sent_again(asked, self._gateway.suspects)
        self.send(messages.Judged(asked.number, resend))

    def _drop(self, number: int) -> None:
        place = self._places.pop(number, None)
        if place is not None:
            place.leave()

    def _report(self, said: messages.Report) -> None:
        place = self._places.get(said.number)
        if place is None:
            return
        for kind, now in said.events:
            attempt = place.attempt
            if attempt is None:
                break
            match kind:
                case Kind.ACCEPTED:
                    attempt.accepted(now)
                case Kind.PREFILL_ASSUMED:
                    attempt.prefill_assumed()
                case Kind.COUNTED:
                    attempt.counted(int(now))
                case Kind.COMPUTED:
                    attempt.computed()
                case Kind.FIRST_BYTE | Kind.FIRST_BYTE_MEASURED:
                    attempt.first_byte(now, measures_prefill=kind is Kind.FIRST_BYTE_MEASURED)
                case Kind.BEGAN:
                    attempt.began()
                case Kind.SUCCEEDED:
                    attempt.succeeded()
                case Kind.FAILED:
                    attempt.failed(now)
                case Kind.CLOSED:
                    place.close(None)
                case Kind.CLOSED_WHOLE:
                    place.close(now)
        if said.left:
            self._drop(said.number)

    def notice(self, engine: Engine, *, ends: bool) -> None:
        """An engine hangs or ends; once for all requests of the front."""
        if (engine.serial, ends) in self._noticed:
            return
        if not self._noticed:
            asyncio.get_running_loop().call_soon(self._noticed.clear)
        self._noticed.add((engine.serial, ends))
        self._publisher.publish_changes()  # before: whether others could take over
        self.send(messages.Notice(engine.model, engine.serial, ends))

    def _report_fault(self, said: messages.EngineFaultReport) -> None:
        fleet = next((fleet for fleet in self._gateway.fleets if fleet.name == said.model), None)
        engine = fleet.engines.get(said.engine) if fleet is not None else None
        if engine is None:
            return
        match said.fault:
            case EngineFault.REFUSED:
                self._router.engine_refused(engine, said.text)
            case EngineFault.FAILED:
                self._router.engine_failed(engine)
            case EngineFault.LACKS_ADAPTER:
                self._router.engine_lacks_adapter(engine, said.text)

    # -- limits ------------------------------------------------------------------------------------------------------

    async def _begin(self, asked: messages.Begin) -> None:
        try:
            admitted = await self._router.begin(asked.tenant, asked.prompt_tokens)
        except GatewayError as error:
            self._refuse(asked.number, error)
            return
        if self._channel is None or self._channel.closed:
            admitted.end(NOTHING_OWED)
            return
        self._admitted[asked.number] = admitted
        self.send(messages.Begun(asked.number))

    def _settle(self, said: messages.Settle) -> None:
        admitted = self._admitted.pop(said.number, None)
        if admitted is not None:
            admitted.end(Settlement(said.requests, said.prompt_tokens, said.reply_tokens))

    # -- the rest ----------------------------------------------------------------------------------------------------

    def _note(self, said: messages.Noted) -> None:
        if said.engine is not None:
            self._router.count_first_byte(said.model, said.engine, said.seconds)
        else:
            self._router.count_continued(said.model, said.seconds)

    async def _find_owner(self, asked: messages.FindOwner) -> None:
        quiet = 0
        for _ in range(OWNER_LOOKS_MAX):
            owner = await self._router.owner_of(asked.response, asked.tenant)
            # Another front may have sent it already: its message then waits for its turn, or in a socket that is read
            # in the iteration after one in which no message waits.
            quiet = 0 if self._turns.spent else quiet + 1
            if owner is not None or quiet > 2:
                break
            await asyncio.sleep(0)
        if owner is None:
            self.send(messages.OwnerIs(asked.number, None, "", 0))
        else:
            self.send(messages.OwnerIs(asked.number, owner.model, owner.engine, owner.tokens))

    async def _operator(self, asked: messages.Operator) -> None:
        answer: list[AsgiMessage] = []

        async def nothing_to_receive() -> AsgiMessage:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def collect(message: AsgiMessage) -> None:
            answer.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": asked.path,
            "raw_path": asked.path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name, value) for name, value in asked.headers],
        }
        await self._operators(scope, nothing_to_receive, collect)
        start = answer[0]
        body = b"".join(message.get("body", b"") for message in answer[1:])
        self.send(messages.OperatorAnswer(asked.number, start["status"], list(start["headers"]), body))

    async def count(self, seconds: float) -> None:
        """Ask for the front's counts, and wait for them for at most so long."""
        self._questions += 1
        number = self._questions
        counted = self._counted[number] = asyncio.Event()
        self.send(messages.Count(number))
        try:
            async with asyncio.timeout(seconds):
                await counted.wait()
        except TimeoutError:
            logger.warning("a front process did not give its counts within %g s; older ones are shown", seconds)
        finally:
            del self._counted[number]

    def _take_counts(self, said: messages.Counts) -> None:
        self.counts = said.families
        counted = self._counted.get(said.asked)
        if counted is not None:
            counted.set()


def _prompt(asked: messages.Route) -> PromptBlocks:
    return PromptBlocks(
        _keys(asked.keys),
        asked.tokens_per_block,
        asked.prompt_tokens,
        asked.spread_key,
        {size: _keys(keys) for size, keys in asked.other_keys.items()},
        text_tokens=asked.text_tokens,
    )


def _keys(data: bytes) -> array[int]:
    keys = array(KEY)
    keys.frombytes(data)
    return keys
