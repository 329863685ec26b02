"""Faults of a fake engine, by name. A refused connection is FakeEngine.stop()."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hang:
    """Takes the request and never answers."""


@dataclass(frozen=True, slots=True)
class HeadThenDie:
    """Sends status and headers, then the process dies: the client has seen nothing yet."""


@dataclass(frozen=True, slots=True)
class DieInStream:
    """The process dies after so many events (a plain reply: in its middle). inside: half of the next one is sent."""

    after_chunks: int
    inside: bool = False


@dataclass(frozen=True, slots=True)
class ErrorInStream:
    """The engine core dies: an error event, then [DONE], with status 200, as vLLM 0.23 does."""

    after_chunks: int


@dataclass(frozen=True, slots=True)
class Slow:
    first_byte_seconds: float = 0.0
    between_chunks_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class HoldInStream:
    """Sends so many events of a stream, then waits for the test; 0 holds the status back too."""

    after_chunks: int
    release: asyncio.Event


@dataclass(frozen=True, slots=True)
class Status:
    """Answers every POST with this status at once, whatever its body: with an error of this kind, or below 400 an empty
    object."""

    status: int
    kind: str = "BadRequestError"


Fault = Hang | HoldInStream | HeadThenDie | DieInStream | ErrorInStream | Slow | Status
