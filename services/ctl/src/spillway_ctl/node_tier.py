"""`spillway node-tier`: keeps the CPU tier that the engines of this node share, until it is stopped."""

from __future__ import annotations

import argparse
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from spillway_connector.node.keeper import NodeKeeper, RegionState, state_names
from spillway_ctl.errors import CommandError
from spillway_ctl.interruption import Interruption
from spillway_ctl.quantities import checked, format_bytes
from spillway_ctl.run import OK, WRONG
from spillway_engine.machine import probe_machine
from spillway_settings.byte_sizes import parse_byte_count

TICK_SECONDS = 0.25  # how long an engine that asks waits at most for an answer
_LOOK_SECONDS = 5.0  # between two looks at what the rows hold
_STALE_SECONDS = 900.0  # a tick that makes a region takes minutes; a longer one hangs
_DESCRIPTION = """\
Keep the CPU tier that the engines of this node share: make the rows that they ask for, touch their memory once, and
release what killed engines had claimed. No copy goes through it; while it is away, engines go on.
"""
_EPILOG = """\
Memory counts as that of whoever touches it first, so this command needs the bytes of the rows and a hundredth more,
and engines need none of it. The files stay when it ends: --remove gives their memory back.

examples:
  spillway node-tier --path /dev/shm/spillway --bytes 64GiB
  spillway node-tier --path /dev/shm/spillway --bytes 256GiB --sizes 2 --host 0.0.0.0 --port 8400
  spillway node-tier --path /dev/shm/spillway --remove
"""


def add_node_tier(areas: Any) -> None:
    parser = areas.add_parser(
        "node-tier",
        help="keep the CPU tier that the engines of this node share",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("--path", type=Path, required=True, metavar="FOLDER", help="in shared memory, or a tmpfs")
    parser.add_argument(
        "--bytes", type=checked(parse_byte_count), metavar="SIZE", help="of the rows of one size, e.g. 64GiB"
    )
    parser.add_argument(
        "--sizes", type=int, default=1, metavar="N", help="how many sizes of rows engines have (default: %(default)s)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address that serves /metrics, /health and /ready")
    parser.add_argument("--port", type=int, metavar="N", help="none: nothing is served")
    parser.add_argument("--remove", action="store_true", help="give back the memory that no engine uses, and end")


def node_tier(given: argparse.Namespace, interruption: Interruption) -> int:
    """Raises CommandError."""
    logging.basicConfig(level=logging.INFO, format="spillway: %(message)s", stream=sys.stdout)
    if given.remove:
        return _remove(given.path)
    if given.bytes is None or given.sizes < 1:
        raise CommandError("node-tier needs --bytes above 0, and --sizes of 1 or more")
    keeper = NodeKeeper(given.path, given.bytes, given.sizes, _room)
    page = Page()
    with _served(page, given.host, given.port):
        print(f"spillway: keeps {given.path}, {format_bytes(given.bytes)} for each size of row", flush=True)
        try:
            _keep(keeper, page, interruption)
        finally:
            keeper.close()
    return OK


def _room() -> tuple[int, str]:
    machine = probe_machine("cpu")
    return machine.memory_available_bytes, machine.memory_limit_source


def _remove(path: Path) -> int:
    keeper = NodeKeeper(path, 0, 0, _room)
    try:
        used = keeper.remove() if path.exists() else []
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error}") from error
    finally:
        keeper.close()
    for row_bytes in used:
        print(f"spillway: {path}/rows-{row_bytes} stays, engines use it", flush=True)
    return WRONG if used else OK


def _keep(keeper: NodeKeeper, page: Page, interruption: Interruption) -> None:
    looked, said = float("-inf"), ""
    while not interruption.asked:
        try:
            keeper.tick()
        except OSError as error:
            if str(error) != said:
                said = str(error)
                print(f"spillway: {keeper.path} cannot be used: {said}; correct that, and it goes on", flush=True)
            page.fail()
        else:
            said = ""
            now = time.monotonic()
            if now - looked >= _LOOK_SECONDS or not page.is_ready:
                looked = now
                page.show(metrics_text(keeper.states(), keeper.released_rows, keeper.refusals))
        page.beat()
        interruption.wait(TICK_SECONDS)


class Page:
    """The metrics page and readiness that are served: written by one thread, read by others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beaten = clock()
        self.text = ""
        self.is_ready = False

    def show(self, text: str) -> None:
        self.text, self.is_ready = text, True

    def fail(self) -> None:
        self.text, self.is_ready = "", False

    def beat(self) -> None:
        self._beaten = self._clock()

    def answer(self, path: str) -> tuple[int, str]:
        """Return the HTTP status and text of a path."""
        match path.partition("?")[0]:
            case "/metrics":
                return 200, self.text
            case "/ready":
                return (200, "ready\n") if self.is_ready else (503, "the folder cannot be used; see the log\n")
            case "/health":
                hangs = self._clock() - self._beaten > _STALE_SECONDS
                return (503, "hangs\n") if hangs else (200, "ok\n")
        return 404, "/metrics, /health, /ready\n"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    address_family = socket.AF_INET


class _Server6(_Server):
    address_family = socket.AF_INET6


@contextmanager
def _served(page: Page, host: str, port: int | None) -> Iterator[None]:
    if port is None:
        yield
        return

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            status, text = page.answer(self.path)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    try:
        server = (_Server6 if ":" in host else _Server)((host, port), Handler)
    except OSError as error:
        raise CommandError(f"--host {host} --port {port}: {error.strerror}; choose another port") from error
    print(f"spillway: serves http://{host}:{server.server_port}/metrics", flush=True)
    thread = threading.Thread(target=server.serve_forever, name="spillway-page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def metrics_text(states: Sequence[RegionState], released_rows: int, refusals: dict[int, str]) -> str:
    """The page that Prometheus reads."""
    names = state_names()
    lines: list[str] = []

    def series(name: str, kind: str, purpose: str, samples: Sequence[tuple[str, int]]) -> None:
        lines.extend([f"# HELP {name} {purpose}", f"# TYPE {name} {kind}"])
        lines.extend(f"{name}{labels} {value}" for labels, value in samples)

    def of(state: RegionState, /, **more: str) -> str:
        pairs = {"row_bytes": str(state.row_bytes), **more}
        return "{" + ",".join(f'{key}="{value}"' for key, value in pairs.items()) + "}"

    series(
        "spillway_node_tier_bytes",
        "gauge",
        "Memory of the rows of one size.",
        [(of(state), state.num_rows * state.row_bytes) for state in states],
    )
    series(
        "spillway_node_tier_rows",
        "gauge",
        "Rows by what is in them: nothing, a chunk that an engine is writing, a chunk, one engine's next chunk.",
        [(of(state, state=names[kind]), count) for state in states for kind, count in state.rows.items()],
    )
    series(
        "spillway_node_tier_engines",
        "gauge",
        "Engines that use the rows.",
        [(of(state), state.engines) for state in states],
    )
    series(
        "spillway_node_tier_namespace_rows",
        "gauge",
        "Rows with a chunk by the first digits of the namespace: engines of one share chunks.",
        [
            (of(state, namespace=name.hex()[:8]), count)
            for state in states
            for name, count in sorted(state.namespaces.items())
        ],
    )
    series(
        "spillway_node_tier_released_rows_total",
        "counter",
        "Rows that killed engines were writing or had reserved, and which are free again.",
        [("", released_rows)],
    )
    series(
        "spillway_node_tier_refused",
        "gauge",
        "1 for rows of a size that engines asked for and did not get; the log has the reason.",
        [(f'{{row_bytes="{row_bytes}"}}', 1) for row_bytes in sorted(refusals)],
    )
    return "\n".join(lines) + "\n"
