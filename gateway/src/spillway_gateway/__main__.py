"""`python -m spillway_gateway --config gateway.yaml`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path

from spillway_gateway import interpreter, logs
from spillway_gateway.access.keys import hash_key, read_keys
from spillway_gateway.app import Gateway
from spillway_gateway.client import descriptors
from spillway_gateway.config.settings import load_config
from spillway_gateway.errors import ConfigError
from spillway_gateway.listeners.server import GatewayServer, PortInUse, bind


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
    if config.processes > 1:
        from spillway_gateway.processes.server import serve  # noqa: PLC0415 - only if several serve

        return serve(config, options.config)
    listen = config.listen
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(contextlib.closing(bind(listen.host, listen.port)))
            ops_listener = None
            if listen.ops_port is not None:
                ops_listener = bind(listen.ops_host or listen.host, listen.ops_port, "listen.opsPort")
                stack.callback(ops_listener.close)
            picker_listener = None
            if listen.picker_port is not None:
                picker_listener = bind(listen.host, listen.picker_port, "listen.pickerPort")
                stack.callback(picker_listener.close)
            server = GatewayServer(Gateway(config, options.config), ops_listener, picker_listener)
        except (PortInUse, ConfigError) as error:
            print(f"spillway-gateway: {error}", file=sys.stderr)
            return 1
        log = logging.getLogger("spillway_gateway")
        log.info("listening on %s://%s:%d", "https" if listen.tls else "http", *listener.getsockname()[:2])
        if ops_listener is not None:
            log.info("operations on http://%s:%d", *ops_listener.getsockname()[:2])
        if picker_listener is not None:
            scheme = "grpcs" if listen.tls else "grpc"
            log.info("endpoint picker on %s://%s:%d", scheme, *picker_listener.getsockname()[:2])
        interpreter.prepare()
        with asyncio.Runner(loop_factory=interpreter.loop_factory()) as runner:
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
