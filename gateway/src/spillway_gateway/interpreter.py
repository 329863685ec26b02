"""Settings of the Python interpreter in every process of the gateway."""

from __future__ import annotations

import asyncio
import gc
import sys

SWITCH_SECONDS = 0.001
# Thresholds of Python's garbage collector. What lives on is mostly requests in progress, which need no collector, and
# looking at all of them again takes 5 % of a request's time: so runs of the oldest generation are rare, and the
# youngest one begins a run only once more is new than a burst of requests makes. Every second run is of the middle
# one, which looks at two such lots at most: it stops all streams for as long as that takes.
GARBAGE_THRESHOLDS = (2_400, 0, 200)


def freeze() -> None:
    """Exclude all objects that exist now (modules, configuration, the index) from full garbage collections, which
    stop the process, however many blocks the index holds. A frozen object is freed when its last reference goes; a
    cycle of them never is."""
    gc.collect()
    gc.freeze()


def prepare() -> None:
    """Prepare the interpreter of a process that begins to serve."""
    freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    # A thread that renders a prompt yields the GIL to the event loop after this time, once for each socket that the
    # loop serves in an iteration.
    sys.setswitchinterval(SWITCH_SECONDS)


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop's event loop if it is installed, because it is faster."""
    try:
        import uvloop  # noqa: PLC0415 - optional
    except ImportError:
        return None
    loop: type[asyncio.AbstractEventLoop] = uvloop.Loop
    return loop
