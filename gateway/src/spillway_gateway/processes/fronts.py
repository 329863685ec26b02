"""Starts the front processes, and starts again what ends unasked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Protocol

from spillway_gateway.ops.server import STALLED_SECONDS
from spillway_gateway.processes import messages
from spillway_gateway.processes.front_session import FrontSession
from spillway_gateway.processes.messages import FamilySamples, Message

logger = logging.getLogger(__name__)

COUNT_SECONDS_MAX = 2.0  # for the counts of a scrape
RESTART_SECONDS_MIN = 0.1
RESTART_SECONDS_MAX = 10.0  # between two starts of one that keeps ending
SOUND_SECONDS = 60.0  # after which an end is no repetition
LOOK_SECONDS = 1.0
NOT_STARTED = -1  # in place of an exit status
STOPPED_LOOKS_MAX = 2  # in a row, in which a process that was stopped by a signal may go on again


class Process(Protocol):
    """A front process."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Wait for the process to end and return its exit status."""

    def kill(self) -> None: ...


Spawn = Callable[[socket.socket], Awaitable[Process]]


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process, as /proc shows it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state == b"T"


async def spawn(router: socket.socket) -> Process:
    """Start a front process that has this end of a socket pair."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"{__package__}",
        str(router.fileno()),
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=[router.fileno()],
        start_new_session=True,  # a terminal's Ctrl-C is for the router, which has them drain
    )


class Fronts:
    """The front processes, on the event loop. new_session: serves one front; its arguments are what to call when it
    listens and when it has ended. first_messages: what a front is sent at its start."""

    def __init__(
        self,
        count: int,
        new_session: Callable[[Callable[[], None], Callable[[FrontSession], None]], FrontSession],
        first_messages: Callable[[], Iterator[Message]],
        spawn: Spawn = spawn,
    ) -> None:
        self._spawn = spawn
        self._count = count
        self._new_session = new_session
        self._first_messages = first_messages
        self._sessions: dict[FrontSession, Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._listening: set[FrontSession] = set()
        self._draining = False
        self.restarts_total = 0
        # Looks in a row without a word from a front, which tells its counts more often: its event loop is stuck. Looks,
        # not seconds, because a router that was late itself has not read what was said.
        self.silent_looks_max = int(STALLED_SECONDS / LOOK_SECONDS)
        self.failed = asyncio.Event()  # one ended before any has ever listened: none would fare better
        self._count_ended: Callable[[FamilySamples], None] = lambda counts: None

    def hand_counts_to(self, count_ended: Callable[[FamilySamples], None]) -> None:
        """Call this with the counts of each front that ends."""
        self._count_ended = count_ended

    @property
    def listening(self) -> int:
        """Fronts that accept connections. May be read in any thread."""
        return len(self._listening)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._sessions.values()]

    def counts(self) -> list[FamilySamples]:
        """The counts that each front has sent last."""
        return [session.counts for session in self._sessions]

    async def count(self) -> None:
        """Ask all of them for their counts."""
        await asyncio.gather(*(session.count(COUNT_SECONDS_MAX) for session in list(self._sessions)))

    def tell(self, message: Message) -> None:
        """Send a message to all."""
        for session in self._sessions:
            session.send(message)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(number)) for number in range(1, self._count + 1)]

    def drain(self, *, now: bool) -> None:
        """End the front processes, after their requests or at once. None is started again."""
        self._draining = True
        self.tell(messages.Drain(now))

    async def ended(self) -> None:
        """Wait until all have ended, after drain()."""
        await asyncio.gather(*self._tasks)

    async def kill(self) -> None:
        """Kill the front processes at once."""
        self._draining = True
        for process in self._sessions.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, number: int) -> None:
        """One front after another, until drain()."""
        pause = RESTART_SECONDS_MIN
        ever_listened = False
        while not self._draining:
            started = time.monotonic()
            try:
                status, listened = await self._run_one()
            except (OSError, ValueError) as error:  # no descriptors or no memory for another process
                logger.error("front process %d could not be started: %s", number, error)
                status, listened = NOT_STARTED, False
            ever_listened = ever_listened or listened
            if self._draining:
                return
            if not ever_listened:
                logger.error("front process %d ended with status %d before it served", number, status)
                self.failed.set()
                return
            if time.monotonic() - started > SOUND_SECONDS:
                pause = RESTART_SECONDS_MIN
            logger.error("front process %d ended with status %d; starting another in %g s", number, status, pause)
            self.restarts_total += 1
            await asyncio.sleep(pause)
            pause = min(2.0 * pause, RESTART_SECONDS_MAX)

    async def _run_one(self) -> tuple[int, bool]:
        """Exit status, and whether it listened."""
        own, its = socket.socketpair()
        listened = False

        def on_listening() -> None:
            nonlocal listened
            listened = True
            self._listening.add(session)
            logger.info("process %d serves, %d of %d", process.pid, len(self._listening), self._count)

        def on_closed(session: FrontSession) -> None:
            self._listening.discard(session)

        with its:
            process = await self._spawn(its)
        session = self._new_session(on_listening, on_closed)
        self._sessions[session] = process
        try:
            await session.connect(own)
            for message in self._first_messages():
                session.send(message)
            if self._draining:
                session.send(messages.Drain(now=False))
            watching = asyncio.create_task(self._watch(session, process))
            try:
                status = await process.wait()
            finally:
                watching.cancel()
            await session.ended.wait()  # what it said last is read, and its requests are released
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            del self._sessions[session]
            self._listening.discard(session)
            self._count_ended(session.counts)
        return status, listened

    async def _watch(self, session: FrontSession, process: Process) -> None:
        """Kill a front that listens and is silent: its clients wait in vain."""
        silent = stopped = 0
        while silent <= self.silent_looks_max and stopped < STOPPED_LOOKS_MAX:
            await asyncio.sleep(LOOK_SECONDS)
            silent = 0 if session.has_spoken() or session not in self._listening else silent + 1
            # The kernel goes on giving a stopped process its share of the connections.
            stopped = stopped + 1 if is_stopped(process.pid) else 0
        if stopped:
            logger.error("process %d is stopped by a signal and still given clients; it is killed", process.pid)
        else:
            logger.error("process %d has said nothing for %d s; it is killed", process.pid, silent)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
