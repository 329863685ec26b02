"""A fake engine outside the test's event loop: in a thread, or as a process of its own.

python -m spillway_gateway.testing.fake_engine_host --model fake
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import threading
from collections.abc import Iterator

from spillway_gateway.testing.fake_engine import FakeEngine
from spillway_gateway.testing.faults import Slow
from spillway_gateway.testing.kv_publisher import KvPublisher

THREAD_SECONDS_MAX = 30.0  # for a start or a stop in the thread


@contextlib.contextmanager
def served_in_thread(engine: FakeEngine) -> Iterator[FakeEngine]:
    """Serve the engine on an event loop in a thread of its own, for a test without one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(engine.start(), loop).result(THREAD_SECONDS_MAX)
        yield engine
    finally:
        asyncio.run_coroutine_threadsafe(engine.stop(), loop).result(THREAD_SECONDS_MAX)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(THREAD_SECONDS_MAX)
        loop.close()


async def _serve(options: argparse.Namespace) -> None:
    publisher = KvPublisher(options.events, options.replay) if options.events else None
    engine = FakeEngine(
        model=options.model,
        name=options.name,
        max_model_len=options.max_model_len,
        block_tokens=options.block_tokens,
        words=options.words,
        publisher=publisher,
        tokenize_route=not options.no_tokenize_route,
        record=False,
    )
    if options.slow_seconds:
        engine.fault = Slow(options.slow_seconds, options.slow_seconds)
    await engine.start(options.port)
    print(f"fake engine {options.name} on {engine.url}", flush=True)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await engine.stop()
        if publisher is not None:
            publisher.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="spillway_gateway.testing.fake_engine_host")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="fake")
    parser.add_argument("--name", default="fake-0")
    parser.add_argument("--words", type=int, default=4)
    parser.add_argument("--max-model-len", type=int, default=100_000)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--slow-seconds", type=float, default=0.0, help="before the first byte and between chunks")
    parser.add_argument("--no-tokenize-route", action="store_true", help="answer 404 there, as other servers do")
    parser.add_argument("--events", help="ZMQ address to publish KV events on")
    parser.add_argument("--replay", help="ZMQ address to serve replays on")
    try:
        asyncio.run(_serve(parser.parse_args()))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
