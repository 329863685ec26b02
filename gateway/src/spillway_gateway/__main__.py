"""`python -m spillway_gateway --config gateway.yaml`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import sys
from pathlib import Path

from spillway_gateway import logs
from spillway_gateway.access.keys import hash_key
from spillway_gateway.app import Gateway
from spillway_gateway.client import descriptors
from spillway_gateway.config.settings import load_config
from spillway_gateway.errors import ConfigError
from spillway_gateway.listeners.server import GatewayServer, PortInUse, bind

SWITCH_SECONDS = 0.001
# Of Python's garbage collector: the youngest generation as by default, the older ones more rarely. What lives on is
# mostly requests in progress, which need no collector, and looking at all of them again takes 5 % of a request's time.
GARBAGE_THRESHOLDS = (700, 20, 50)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 after a clean shutdown, 1 with one sentence on stderr otherwise."""
    parser = argparse.ArgumentParser(prog="spillway_gateway", description="Spillway's OpenAI-compatible gateway.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration")
    parser.add_argument("--check", action="store_true", help="check the configuration and exit")
    parser.add_argument(
        "--hash-key", action="store_true", help="read an API key from stdin, print its line for auth.keysFile, and exit"
    )
    options = parser.parse_args(arguments)
    if options.hash_key:
        return _hash_key()
    if options.config is None:
        parser.error("the following arguments are required: --config")
    try:
        config = load_config(options.config)
    except ConfigError as error:
        print(f"spillway-gateway: {error}", file=sys.stderr)
        return 1
    if options.check:
        print(f"{options.config}: valid")
        return 0
    logs.set_up(config.log)
    descriptors.raise_limit()
    listen = config.listen
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(contextlib.closing(bind(listen.host, listen.port)))
            ops_listener = None
            if listen.ops_port is not None:
                ops_listener = bind(listen.ops_host or listen.host, listen.ops_port, "listen.opsPort")
                stack.callback(ops_listener.close)
            server = GatewayServer(Gateway(config, options.config), ops_listener)
        except (PortInUse, ConfigError) as error:
            print(f"spillway-gateway: {error}", file=sys.stderr)
            return 1
        log = logging.getLogger("spillway_gateway")
        log.info("listening on %s://%s:%d", "https" if listen.tls else "http", *listener.getsockname()[:2])
        if ops_listener is not None:
            log.info("operations on http://%s:%d", *ops_listener.getsockname()[:2])
        # What exists now stays: modules, configuration, the index's tables. Frozen, it is not scanned by full garbage
        # collections, which stop the process, however many blocks the index holds.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GARBAGE_THRESHOLDS)
        # A thread that renders a prompt yields the GIL to the event loop after this time, once for each socket that the
        # loop serves in an iteration.
        sys.setswitchinterval(SWITCH_SECONDS)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(server.serve(sockets=[listener]))
    return 0 if server.started else 1


def _hash_key() -> int:
    """The key is read from stdin: every user of the machine can see a process's arguments."""
    try:
        print(hash_key(sys.stdin.readline().strip()))
    except ConfigError as error:
        print(f"spillway-gateway: {error}", file=sys.stderr)
        return 1
    return 0


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 - optional: faster where it is installed
    except ImportError:
        return None
    loop: type[asyncio.AbstractEventLoop] = uvloop.Loop
    return loop


if __name__ == "__main__":
    sys.exit(main())
