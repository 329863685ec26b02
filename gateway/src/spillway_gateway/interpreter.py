"""What every process of the gateway asks of its interpreter before it serves."""

from __future__ import annotations

import asyncio
import gc
import sys

SWITCH_SECONDS = 0.001
# Thresholds of Python's garbage collector: the default for the youngest generation, short runs of the middle one, and
# rare runs of the oldest. What lives on is mostly requests in progress, which need no collector, and looking at all of
# them again takes 5 % of a request's time. A run of the middle one stops all streams for as long as looking at what
# hundreds of new connections hold takes; each object passes it once, so short runs cost no more than long ones.
GARBAGE_THRESHOLDS = (700, 5, 200)


def freeze() -> None:
    """What exists now stays: modules, configuration, the index's tables. Frozen, it is not scanned by full garbage
    collections, which stop the process, however many blocks the index holds. It is freed when its last reference goes;
    a cycle of frozen objects never is."""
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
