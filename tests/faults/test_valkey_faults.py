"""A faulty server costs recomputation, never an answer: killed, unreachable, silent, full, emptied, with damaged
values."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis
from stack_driver.deadlines import eventually
from stack_driver.engine_metrics import new_failures
from stack_driver.known_answers import compute_references
from stack_driver.running_stack import RunningStack
from stack_driver.shared_stores import ValkeyStore

from spillway_stack.processes import wait_gone

pytestmark = pytest.mark.tiers("redis")

FULL_BYTES = 1 << 20  # far less than what is stored: the server stays full, whatever it frees of its own buffers
AWAY = {"connect", "disconnected", "timeout"}


def test_killed_and_started_again(stack: RunningStack) -> None:
    known = stack.compute_and_store(stack.a)
    with _supervisor_paused(stack):
        valkey = stack.process("valkey")
        valkey.signal(signal.SIGKILL)
        assert not wait_gone([valkey], 60.0)
        assert stack.ask_shared(stack.b, known).source == "none"
        compute_references(stack.a, stack.new_prompt(2))
        _wait_failure(stack, AWAY)
    eventually("the supervisor starts Valkey again", lambda: stack.component("valkey").ready, 120.0)
    stack.wait_shared_tier_works()


def test_silent_server(stack: RunningStack) -> None:
    """SIGSTOP: the kernel accepts connections that are never answered, so deadlines must end the wait."""
    known = stack.compute_and_store(stack.a)
    valkey = stack.process("valkey")
    valkey.signal(signal.SIGSTOP)
    try:
        stack.ask_shared(stack.b, known)
        compute_references(stack.a, stack.new_prompt(2))
        _wait_failure(stack, {"timeout"})
    finally:
        valkey.signal(signal.SIGCONT)
    stack.wait_shared_tier_works()


def test_full_server_that_evicts_nothing(stack: RunningStack) -> None:
    known = stack.compute_and_store(stack.a)
    server = _server(stack)
    limits = {name: server.config_get(name)[name] for name in ("maxmemory", "maxmemory-policy")}
    server.config_set("maxmemory-policy", "noeviction")
    server.config_set("maxmemory", FULL_BYTES)
    try:
        with pytest.raises(redis.ResponseError, match="maxmemory"):
            server.set("one more", "value")
        stack.ask_shared(stack.b, known)
        compute_references(stack.a, stack.new_prompt(2))
        _wait_failure(stack, {"out_of_memory"})
    finally:
        for name, value in limits.items():
            server.config_set(name, value)
    stack.wait_shared_tier_works()


def test_emptied_server(stack: RunningStack) -> None:
    known = stack.compute_and_store(stack.a)
    _server(stack).flushall()
    assert stack.ask_shared(stack.b, known).source == "none"
    stack.wait_shared_tier_works()


def test_damaged_values_are_recomputed_and_never_served(stack: RunningStack) -> None:
    store = stack.store
    assert isinstance(store, ValkeyStore)
    old = set(store.keys())
    known = stack.compute_and_store(stack.a)
    for number, key in enumerate(sorted(set(store.keys()) - old)):
        offset = [100, 192, store.server.strlen(key) - 1][number % 3]
        byte = store.server.getrange(key, offset, offset)[0]
        store.server.setrange(key, offset, bytes([byte ^ 0x10]))
    before = stack.b.failures()
    assert stack.ask_shared(stack.b, known).source == "none", "damaged blocks were used"
    assert new_failures(before, stack.b.failures(), "load") == {"header", "payload"}


def _server(stack: RunningStack) -> redis.Redis:
    store = stack.store
    assert isinstance(store, ValkeyStore)
    return store.server


@contextmanager
def _supervisor_paused(stack: RunningStack) -> Iterator[None]:
    """The supervisor does not restart Valkey while the block runs."""
    supervisor = stack.supervisor
    supervisor.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        supervisor.signal(signal.SIGCONT)


def _wait_failure(stack: RunningStack, reasons: set[str]) -> None:
    def counted() -> set[str]:
        return {reason for (_, reason), count in stack.a.failures().items() if count}

    eventually(f"an operation fails for one of {sorted(reasons)}", lambda: counted() & reasons, 120.0)
