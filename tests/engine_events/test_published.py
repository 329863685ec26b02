"""Events of this interpreter's vLLM, through its own publisher, into the gateway's index; every version runs this."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq.asyncio
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import EventPublisherFactory

from engine_events.published import BLOCK_TOKENS, EVICTED, PROMPTS, published, sample_path
from spillway_gateway.config.settings import EngineConfig, RoutingConfig
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.kv_events import EventFollower
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.routing.prefix import token_block_keys

WAIT_SECONDS = 120.0
TESTS = Path(__file__).resolve().parents[1]


def test_the_sample_of_this_version_is_what_it_publishes() -> None:
    """Another encoding, field or block hash, and the gateway's tests would rest on bytes that no engine sends."""
    done = subprocess.run(
        [sys.executable, "-c", "import json; from engine_events.published import sample; print(json.dumps(sample()))"],
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(sample_path().read_text())


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("topic", ["", "kv@pod-0"])
async def test_the_gateway_follows_this_versions_publisher(topic: str) -> None:
    """Batches from before the subscription come by replay, the rest live; both framings are the publisher's own."""
    made = published()
    batches, stored = made.batches, made.steps.index("offload") + 1
    # vLLM binds addresses with a wildcard only.
    events, replay = (address.replace("127.0.0.1", "*") for address in (free_address(), free_address()))
    publisher = EventPublisherFactory.create(
        KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=events, replay_endpoint=replay, topic=topic
        )
    )
    index = PrefixIndex(
        "m", bytes_max=10_000_000, orphans_max=100, default_block_tokens=BLOCK_TOKENS, clock=time.monotonic
    )
    index.add_engine("e")
    local = [address.replace("*", "127.0.0.1") for address in (events, replay)]
    metrics = GatewayMetrics()
    context = zmq.asyncio.Context()
    engine = Engine("m", EngineConfig("e", "http://127.0.0.1:9", *local), RoutingConfig())
    follower = asyncio.create_task(EventFollower(engine, index, metrics, context).run())

    def held(name: str) -> int:
        prompt = next(prompt for prompt in PROMPTS if prompt.name == name)
        keys = token_block_keys(index.namespace(prompt.salt, prompt.lora), prompt.tokens, BLOCK_TOKENS)
        found = index.match(keys, BLOCK_TOKENS)
        return found["e"].total_tokens if found else 0

    async def until_held(tokens: dict[str, int]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while {name: held(name) for name in tokens} != tokens:  # noqa: ASYNC110 - the index has no event for it
                await asyncio.sleep(0.02)

    try:
        for batch in batches[:stored]:
            publisher.publish(batch)
        await until_held({prompt.name: len(prompt.tokens) for prompt in PROMPTS})
        assert engine.events_live
        for batch in batches[stored:]:
            publisher.publish(batch)
        await until_held({prompt.name: 0 for prompt in PROMPTS})
    finally:
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
        publisher.shutdown()
        context.destroy(linger=0)
    assert metrics.registry.get_sample_value("spillway_gateway_events_undecodable_total", {"engine": "e"}) in (None, 0)
    assert EVICTED in {prompt.name for prompt in PROMPTS}
