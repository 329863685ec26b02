"""A gateway process that measures its own event loop, for Target: `python -m attack.probed_gateway` and the gateway's
arguments.

A timer fires each millisecond on the event loop. The CPU time that the process spends between two firings is that of at
most a millisecond and one iteration, however late the machine lets the timer fire. All threads count, as one that holds
the interpreter's lock stops the event loop too.

Each line on stdin is a command: `report` answers with one JSON line on stdout, `reset` begins again, `hold N` spends N
reference units in one iteration.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable

from spillway_gateway import __main__ as gateway
from spillway_gateway import interpreter

TICK_SECONDS = 0.001
_DOCUMENT = json.dumps([{"role": "user", "content": f"word {number}"} for number in range(10_000)])


def reference_unit() -> None:
    """Spend some milliseconds of CPU time: parse 10,000 small objects."""
    json.loads(_DOCUMENT)


class LoopProbe:
    """All but commands() runs on the event loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._reset()
        self._tick()
        threading.Thread(target=self._commands, daemon=True).start()

    def _reset(self) -> None:
        self._seconds_max = 0.0
        self._measured_at = time.process_time()

    def _measure(self) -> None:
        now = time.process_time()
        self._seconds_max = max(self._seconds_max, now - self._measured_at)
        self._measured_at = now

    def _tick(self) -> None:
        self._measure()
        self._loop.call_later(TICK_SECONDS, self._tick)

    def _commands(self) -> None:
        actions: dict[str, Callable[..., None]] = {"report": self._report, "reset": self._reset, "hold": self._hold}
        for line in sys.stdin:
            name, *numbers = line.split()
            self._loop.call_soon_threadsafe(actions[name], *map(int, numbers))

    def _hold(self, units: int) -> None:
        for _ in range(units):
            reference_unit()

    def _report(self) -> None:
        self._measure()
        seconds = []
        for _ in range(5):
            before = time.process_time()
            reference_unit()
            seconds.append(time.process_time() - before)
        report = {"iteration_seconds_max": self._seconds_max, "reference_seconds": statistics.median(seconds)}
        print(json.dumps(report), flush=True)
        self._reset()


def main() -> int:
    new_loop = interpreter.loop_factory() or asyncio.new_event_loop

    def new_probed_loop() -> asyncio.AbstractEventLoop:
        loop = new_loop()
        LoopProbe(loop)
        return loop

    interpreter.loop_factory = lambda: new_probed_loop  # type: ignore[assignment,return-value]
    return gateway.main()


if __name__ == "__main__":
    sys.exit(main())
