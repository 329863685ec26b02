"""One bucket for several threads: requests with a deadline, a bounded number at once, on an event loop of its own.

obstore signs, pools connections, renews credentials and repeats what the store asks to repeat (503, 429), with pauses
that double. Here are the bounds: a request that passes its deadline is cancelled, pauses included.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from obstore.store import S3Store

from spillway_connector.errors import ConfigError, RefusedReason, TierError, TierRefused, TierTimeout
from spillway_connector.tiers.s3.faults import explained
from spillway_connector.tiers.s3.place import S3Place
from spillway_connector.tiers.tier import Clock

_Result = TypeVar("_Result")
RETRIES_MAX = 3
FIRST_PAUSE = timedelta(milliseconds=100)
LONGEST_PAUSE = timedelta(seconds=1)
BURST_SECONDS = 1.0  # so long a pause of requests may be made up for at once: a lookup asks for all of a prompt
CANCEL_SECONDS = 1.0  # what a cancelled request may take to end


class RequestRate:
    """Allows ``per_second`` requests a second, and more at once after a pause."""

    def __init__(self, per_second: float) -> None:
        self._seconds_each = 1.0 / per_second
        self._next_at = float("-inf")  # from when on the next request may begin, the burst left aside

    def wait_seconds(self, now: float) -> float:
        """Return the seconds that a request which comes now has to wait."""
        return max(0.0, max(self._next_at, now - BURST_SECONDS) - now)

    def begin(self, now: float) -> float:
        """Count a request that comes now. Returns the seconds that it has to wait."""
        wait = self.wait_seconds(now)
        self._next_at = max(self._next_at, now - BURST_SECONDS) + self._seconds_each
        return wait


class S3Client:
    """Runs requests on one bucket. Nothing is connected, and no thread started, before the first.

    Credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN), else the web identity of the service
    account, else the container's or the node's metadata service; the last three are renewed before they expire.
    connections: requests at once, of lookups and of blocks each. A request beyond them waits within its deadline.
    puts_per_second_max, gets_per_second_max: HEAD counts as GET, as on a bill; None: no bound.

    Attributes:
        requests: How many were begun, by kind: put, get, head, delete. A request that obstore repeats counts once.
    """

    def __init__(
        self,
        place: S3Place,
        connections: int,
        clock: Clock = time.monotonic,
        *,
        puts_per_second_max: float | None = None,
        gets_per_second_max: float | None = None,
    ) -> None:
        self.place = place
        self.requests: Counter[str] = Counter()
        puts = None if puts_per_second_max is None else RequestRate(puts_per_second_max)
        gets = None if gets_per_second_max is None else RequestRate(gets_per_second_max)
        self._rates = {"put": puts, "get": gets, "head": gets}
        self._clock = clock
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self.lookups = asyncio.Semaphore(connections)
        self.transfers = asyncio.Semaphore(connections)
        self.bucket = self._open()

    def run(self, work: Callable[[], Coroutine[Any, Any, _Result]], deadline: float) -> _Result:
        """Run ``work`` on the loop and return its result. Raises TierError."""
        left = deadline - self._clock()
        if self._closed:
            raise _closed()
        if left <= 0:
            raise TierTimeout("the deadline passed before the operation began")
        loop = self._started()
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work(), left), loop)
        try:
            return future.result(left + CANCEL_SECONDS)
        except (TimeoutError, concurrent.futures.TimeoutError):
            future.cancel()
            raise TierTimeout(f"{self.place}: no answer within {left:.3g} s") from None
        except (asyncio.CancelledError, concurrent.futures.CancelledError):
            raise _closed() from None
        except TierError:
            raise
        except Exception as error:
            raise explained(error, str(self.place)) from error

    async def turn(self, kind: str, deadline: float) -> None:
        """Wait until a request may begin, and count it. Raises TierRefused(QUEUE_AGE) if that is too late."""
        rate, now = self._rates.get(kind), self._clock()
        if rate is not None:
            if now + rate.wait_seconds(now) >= deadline:
                bound = "putsPerSecondMax" if kind == "put" else "getsPerSecondMax"
                raise TierRefused(RefusedReason.QUEUE_AGE, f"{self.place}: s3.{bound}: too many requests at once")
            if wait := rate.begin(now):
                await asyncio.sleep(wait)
        self.requests[kind] += 1

    def close(self) -> None:
        """Cancel what is under way. May be called twice."""
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
        if self._thread is not None:
            self._thread.join(CANCEL_SECONDS)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise _closed()
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name="spillway-s3", daemon=True)
                self._thread.start()
            return self._loop

    def _open(self) -> S3Store:
        """Raises ConfigError."""
        place = self.place
        options: dict[str, Any] = {"timeout": "60s", "connect_timeout": "5s", "allow_http": True}
        if place.ca_file is not None:
            try:
                options["root_certificate"] = Path(place.ca_file).read_bytes()
            except OSError as error:
                raise ConfigError(f"s3.ca_file: {place.ca_file} cannot be read: {error.strerror}") from error
        given: dict[str, Any] = {"region": place.region, "virtual_hosted_style_request": not place.path_style}
        given["disable_bulk_delete"] = True  # not every store has it, and a discard is of one object
        if place.endpoint is not None:
            given["endpoint"] = place.endpoint
        try:
            return S3Store(
                place.bucket,
                client_options=options,  # type: ignore[arg-type]
                retry_config={
                    "max_retries": RETRIES_MAX,
                    "retry_timeout": timedelta(seconds=30),
                    "backoff": {"init_backoff": FIRST_PAUSE, "max_backoff": LONGEST_PAUSE, "base": 2},
                },
                **given,
            )
        except Exception as error:
            raise ConfigError(f"s3: {str(error).partition(chr(10))[0]}") from error


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    open_tasks = asyncio.all_tasks(loop)
    for task in open_tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*open_tasks, return_exceptions=True))
    loop.close()


def _closed() -> TierRefused:
    return TierRefused(RefusedReason.CLOSED, "the tier is closed")
