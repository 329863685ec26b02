"""`python -m spillway_gateway.processes FD`: a front process, as processes/fronts.py starts it."""

from __future__ import annotations

import asyncio
import socket
import sys

from spillway_gateway import interpreter
from spillway_gateway.client import descriptors
from spillway_gateway.processes.front import Front


async def _run(router: socket.socket) -> int:
    return await Front(interpreter.prepare).run(router)


def main() -> int:
    """The argument is the descriptor of a socket to the router process. Exit status: 0 after a clean shutdown."""
    descriptors.raise_limit()
    with asyncio.Runner(loop_factory=interpreter.loop_factory()) as runner:
        return runner.run(_run(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    sys.exit(main())
