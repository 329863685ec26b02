"""`python -m spillway_gateway --config gateway.yaml`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from spillway_gateway import interpreter, logs
from spillway_gateway.access.keys import hash_key, read_keys
from spillway_gateway.app import Gateway
from spillway_gateway.client import descriptors
from spillway_gateway.config.settings import GatewayConfig, load_config
from spillway_gateway.errors import ConfigError
from spillway_gateway.listeners.server import GatewayServer, PortInUse, bind, reserve

if TYPE_CHECKING:
    from spillway_gateway.processes.server import RouterServer


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 after a clean shutdown, 1 with one sentence on stderr otherwise."""
    parser = argparse.ArgumentParser(prog="spillway_gateway", description="Spillway's OpenAI-compatible gateway.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration")
    parser.add_argument("--check", action="store_true", help="check the configuration and exit")
    parser.add_argument(
        "--hash-key", action="store_true", help="read an API key from stdin, print its line for auth.keysFile, and exit"
    )
    parser.add_argument(
        "--check-keys", type=Path, metavar="FILE", help="check a file of tenants and keys (/dev/stdin: a pipe) and exit"
    )
    options = parser.parse_args(arguments)
    if options.hash_key:
        return _hash_key()
    if options.check_keys is not None:
        return _check_keys(options.check_keys)
    if options.config is None:
        parser.error("the following arguments are required: --config")
    if not options.check:
        # It asks for the file to be read, which is about to happen; by default it would end the process.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
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
    return _serve(config, options.config)


def _serve(config: GatewayConfig, path: Path) -> int:
    """Serve until a signal ends it. Several processes listen for clients beside the sockets here, which keep the
    addresses."""
    listen, several = config.listen, config.processes > 1
    take = reserve if several else bind
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(take(listen.host, listen.port))
            ops_listener = picker_listener = None
            if listen.ops_port is not None:
                ops_host = listen.ops_host or listen.host
                ops_listener = stack.enter_context(bind(ops_host, listen.ops_port, "listen.opsPort"))
            if listen.picker_port is not None:
                picker_listener = stack.enter_context(take(listen.host, listen.picker_port, "listen.pickerPort"))
            server: GatewayServer | RouterServer
            if several:
                from spillway_gateway.processes.server import RouterServer  # noqa: PLC0415 - only if several serve

                server = RouterServer(config, path, listener, ops_listener, picker_listener)
                serving = server.serve()
            else:
                server = GatewayServer(Gateway(config, path), ops_listener, picker_listener)
                serving = server.serve(sockets=[listener])
        except (PortInUse, ConfigError) as error:
            print(f"spillway-gateway: {error}", file=sys.stderr)
            return 1
        log, scheme = logging.getLogger("spillway_gateway"), "https" if listen.tls else "http"
        listening = f"{config.processes} processes will listen" if several else "listening"
        log.info("%s on %s://%s:%d", listening, scheme, *listener.getsockname()[:2])
        if ops_listener is not None:
            log.info("operations on http://%s:%d", *ops_listener.getsockname()[:2])
        if picker_listener is not None:
            scheme = "grpcs" if listen.tls else "grpc"
            log.info("endpoint picker on %s://%s:%d", scheme, *picker_listener.getsockname()[:2])
        interpreter.prepare()
        with asyncio.Runner(loop_factory=interpreter.loop_factory()) as runner:
            runner.run(serving)
    return 0 if server.started else 1


def _hash_key() -> int:
    """The key is read from stdin: every user of the machine can see a process's arguments."""
    try:
        print(hash_key(sys.stdin.readline().strip()))
    except ConfigError as error:
        print(f"spillway-gateway: {error}", file=sys.stderr)
        return 1
    return 0


def _check_keys(path: Path) -> int:
    """Check a file of keys before the Secret with it is replaced: a pod that starts with a bad one fails."""
    try:
        read_keys(path)
    except ConfigError as error:
        print(f"spillway-gateway: {error}", file=sys.stderr)
        return 1
    print(f"{path}: valid")
    return 0


if __name__ == "__main__":
    sys.exit(main())
