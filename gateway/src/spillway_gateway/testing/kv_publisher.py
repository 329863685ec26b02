"""Publishes KV events as vLLM does: PUB with sequence numbers, ROUTER for replays, a bounded memory of batches.

Both event shapes and both replay framings of the field are offered, so that tests meet every engine version.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import zmq

_END = b"\xff" * 8


class KvPublisher:
    """One thread owns both sockets, as in the engine. events, replay: ZMQ addresses; port 0 lets the system choose."""

    def __init__(
        self,
        events: str = "tcp://127.0.0.1:*",
        replay: str | None = "tcp://127.0.0.1:*",
        *,
        shape: Literal["array", "map"] = "array",
        replay_topic: bool = False,
        buffer_steps: int = 10_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._shape = shape
        self._replay_topic = replay_topic
        self._clock = clock
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._sequence = 0
        self.silent_replays = False  # replays end without their end marker
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.LINGER, 0)
        self._pub.setsockopt(zmq.SNDHWM, 100_000)  # the default of vLLM's KVEventsConfig.hwm
        self._pub.bind(events)
        self.events_url = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_url: str | None = None
        self._router: zmq.Socket[bytes] | None = None
        if replay is not None:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.LINGER, 0)
            self._router.bind(replay)
            self.replay_url = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve_replays, daemon=True)
        self._thread.start()

    def stored(
        self,
        hashes: list[Any],
        parent: Any,
        tokens: list[int],
        block_size: int,
        *,
        medium: str = "GPU",
        lora_name: str | None = None,
        extra_keys: list[Any] | None = None,
        lose: bool = False,
    ) -> None:
        values = [hashes, parent, tokens, block_size, None, medium, lora_name, extra_keys, None, None, None]
        names = [
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
            "extra_keys",
            "group_idx",
            "kv_cache_spec_kind",
            "kv_cache_spec_sliding_window",
        ]
        self.publish([self._event("BlockStored", names, values)], lose=lose)

    def removed(self, hashes: list[Any], *, medium: str = "GPU", lose: bool = False) -> None:
        names = ["block_hashes", "medium", "group_idx"]
        self.publish([self._event("BlockRemoved", names, [hashes, medium, None])], lose=lose)

    def cleared(self) -> None:
        self.publish([self._event("AllBlocksCleared", [], [])])

    def _event(self, tag: str, names: list[str], values: list[Any]) -> Any:
        if self._shape == "array":
            return [tag, *values]
        pairs = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        return {"type": tag, **pairs}

    def publish(self, events: list[Any], *, lose: bool = False) -> None:
        """lose: kept for replays and never sent, as when a subscriber is too slow."""
        self.publish_payload(msgspec.msgpack.encode([self._clock(), events, None]), lose=lose)

    def publish_payload(self, payload: bytes, *, lose: bool = False) -> None:
        """A batch as bytes, decodable or not."""
        with self._lock:
            sequence = self._sequence
            self._sequence += 1
            self._batches.append((sequence, payload))
            if not lose:
                self._pub.send_multipart([b"kv@fake", sequence.to_bytes(8, "big"), payload])

    def _serve_replays(self) -> None:
        router = self._router
        while router is not None and not self._closing.is_set():
            if not router.poll(20):
                continue
            identity, _, start = router.recv_multipart()
            topic = [b"kv@fake"] if self._replay_topic else []
            end_topic = [b""] if self._replay_topic else []
            batches = self.batches(int.from_bytes(start, "big"))
            for sequence, payload in batches:
                router.send_multipart([identity, b"", *topic, sequence.to_bytes(8, "big"), payload])
            if not self.silent_replays:
                router.send_multipart([identity, b"", *end_topic, _END, b""])

    def batches(self, first: int) -> list[tuple[int, bytes]]:
        """Return the batches of a replay from this sequence on."""
        with self._lock:
            return [batch for batch in self._batches if batch[0] >= first]

    def close(self) -> None:
        """Ends the thread and frees both ports."""
        self._closing.set()
        self._thread.join()
        self._pub.close(linger=0)
        if self._router is not None:
            self._router.close(linger=0)
        self._context.term()
