"""Whether a failed attempt may be made again elsewhere. Pure decisions and a budget; no I/O.

Nothing is retried once a body byte has reached the client: a second generation would continue another text.
"""

from __future__ import annotations

import msgspec

from spillway_gateway.errors import (
    EngineConnectTimeout,
    EngineDisconnected,
    EngineEnding,
    EngineFailed,
    EngineRefused,
    EngineWentDown,
    UpstreamError,
)

RETRYABLE_STATUSES = frozenset({502, 503, 504})
_ERROR_EVENT = b'data: {"error"'
_ANTHROPIC_ERROR_EVENT = b"event: error\ndata: "
# The engine is gone or ends, and what it had of the request went with it: whoever takes the request over does work that
# was admitted already and that nobody else does. All that waited there move at once, however many they are.
_ENGINE_GONE = (EngineRefused, EngineDisconnected, EngineWentDown, EngineEnding, EngineFailed)
# The request never left the gateway, so it cannot be what such an engine fails of, and asking the next costs nothing.
_NEVER_SENT = (EngineRefused, EngineConnectTimeout)
_DEAD_CORE = "EngineCore encountered an issue"  # vLLM 0.23's EngineDeadError, whatever status it comes with


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None
    type: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


_decoder = msgspec.json.Decoder(_ErrorBody)


def stream_failure(first_chunk: bytes) -> str | None:
    """The engine's own words when a stream begins with a server error instead of a token, else None.

    vLLM answers 200 before it computes; when its core dies, that is all its server can still say.
    """
    if first_chunk.startswith(_ANTHROPIC_ERROR_EVENT):
        error = _error_of(first_chunk.removeprefix(_ANTHROPIC_ERROR_EVENT).partition(b"\n")[0])
        return error.message if error is not None and error.type == "internal_error" else None
    if not first_chunk.startswith(_ERROR_EVENT):
        return None
    error = _error_of(first_chunk.partition(b"\n")[0].removeprefix(b"data: "))
    return error.message if error is not None and isinstance(error.code, int) and error.code >= 500 else None


def failure_within(events: bytes) -> bool:
    """Whether whole events of a stream that has begun hold a server error: the engine failed, and says so itself."""
    at = events.find(_ERROR_EVENT)
    return at >= 0 and (at == 0 or events[at - 1 : at] == b"\n") and stream_failure(events[at:]) is not None


def plain_failure(status: int, body: bytes) -> str | None:
    """The same for a plain reply. A 500 alone may be the request's own fault and is passed on."""
    error = _error_of(body) if status == 500 else None
    return error.message if error is not None and _DEAD_CORE in error.message else None


def _error_of(body: bytes) -> _Error | None:
    try:
        return _decoder.decode(body).error
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


class RetryBudget:
    """Token bucket filled by requests: a share of the traffic may be retried, and a burst at once.

    ratio: retries earned per request. burst: most that can be saved up. Drawn on by retries of what an engine that
    stays refused or was late with, as it does under too much load: there, a retry is load on top. What an engine left
    behind that is gone is not charged; `may_retry`'s attempts_max bounds it.
    """

    def __init__(self, ratio: float, burst: int) -> None:
        self._ratio = ratio
        self._burst = float(burst)
        self._available = float(burst)

    def earn(self) -> None:
        self._available = min(self._burst, self._available + self._ratio)

    def spend(self, failure: UpstreamError) -> bool:
        """Take one retry after this failure; False when none is left."""
        if isinstance(failure, _ENGINE_GONE):
            return True
        if self._available < 1:
            return False
        self._available -= 1
        return True


def is_attempt(failure: UpstreamError) -> bool:
    """Whether the engine that failed so had the request."""
    return not isinstance(failure, _NEVER_SENT)


def may_retry(*, bytes_sent: bool, attempts: int, attempts_max: int, engines_left: bool) -> bool:
    """attempts: engines that have had the request. Each engine is asked once, so this ends."""
    return not bytes_sent and attempts < attempts_max and engines_left
