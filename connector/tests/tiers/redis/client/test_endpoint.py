from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spillway_connector.errors import ConfigError, RefusedReason, TierRefused
from spillway_connector.tiers.redis.client.endpoint import Address, RedisEndpoint, Topology


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("redis://10.0.0.1", RedisEndpoint("10.0.0.1")),
        ("redis://kv.example:7000/5", RedisEndpoint("kv.example", 7000, database=5)),
        ("redis://[::1]:7000/", RedisEndpoint("::1", 7000)),
        ("rediss://kv.example", RedisEndpoint("kv.example", tls=True)),
        ("unix:///run/kv.sock", RedisEndpoint(unix_path="/run/kv.sock")),
        ("unix:///run/kv.sock?db=2", RedisEndpoint(unix_path="/run/kv.sock", database=2)),
    ],
)
def test_each_form_is_understood(url: str, endpoint: RedisEndpoint) -> None:
    assert RedisEndpoint.from_url(url) == endpoint


@pytest.mark.parametrize(
    "url",
    ["", "kv.example:6379", "http://kv.example", "redis://", "redis://h:port", "redis://h/x", "unix://host/path",
     "unix://", "redis://h?db=1", "redis://h:99999", "redis://h,i", "redis-ring://h", "redis://h#x", "redis://h/\u0663",
     "redis-sentinel://h", "redis-sentinel://h/s?x=1", "redis-sentinel://h/s?db=x", "redis-sentinel://h,/s",
     "redis-cluster://", "redis-cluster://h/1", "redis-cluster://h?db=1"],
)  # fmt: skip
def test_what_is_not_understood_is_refused_with_the_forms(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis\.url"):
        RedisEndpoint.from_url(url)


def test_a_password_in_the_url_is_refused_and_never_repeated() -> None:
    with pytest.raises(ConfigError, match="passwordEnv") as caught:
        RedisEndpoint.from_url("redis://user:hunter2@kv.example")
    assert "hunter2" not in str(caught.value)


def test_a_password_never_shows() -> None:
    endpoint = RedisEndpoint.from_url("redis://h", username="u", password="hunter2")
    assert endpoint.password == "hunter2"
    assert "hunter2" not in f"{endpoint} {endpoint!r}"


def test_sentinels_and_their_service_are_understood() -> None:
    endpoint = RedisEndpoint.from_url("rediss-sentinel://a,b:7000,[::1]:7001/kv%20tier?db=2", username="u")
    assert endpoint.topology is Topology.SENTINEL
    assert endpoint.seeds == (Address("a", 26379), Address("b", 7000), Address("::1", 7001))
    assert (endpoint.service, endpoint.database, endpoint.tls, endpoint.username) == ("kv tier", 2, True, "u")
    assert str(endpoint) == "rediss-sentinel://a:26379,b:7000,[::1]:7001/kv tier?db=2"


def test_the_nodes_of_a_cluster_are_understood() -> None:
    endpoint = RedisEndpoint.from_url("redis-cluster://a,b:7000/0")
    assert endpoint.topology is Topology.CLUSTER
    assert endpoint.seeds == (Address("a", 6379), Address("b", 7000))
    one = endpoint.at(Address("c", 7002))
    assert str(one) == "redis://c:7002/0"
    assert (one.topology, one.seeds) == (Topology.SERVER, ())


def test_a_password_file_is_read_each_time(tmp_path: Path) -> None:
    file = tmp_path / "password"
    endpoint = RedisEndpoint.from_url("redis://h", password_file=str(file))
    for secret in ("first", "sec ond "):
        file.write_text(secret + "\n")
        assert endpoint.current_password() == secret
    for make_unusable in (lambda: file.write_bytes(b""), lambda: file.write_bytes(b"\xff"), file.unlink):
        make_unusable()
        with pytest.raises(TierRefused, match="passwordFile") as caught:
            endpoint.current_password()
        assert caught.value.reason == RefusedReason.AUTHENTICATION


def test_reading_a_url_does_not_import_redis_py() -> None:
    """The import of redis-py takes 25 MB and half a second, which an engine without a Redis tier is to be spared."""
    code = f"import sys, {RedisEndpoint.__module__}, spillway_connector.config; sys.exit('redis' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_server_is_the_same_place_however_it_is_reached() -> None:
    plain = RedisEndpoint.from_url("redis://cache:6379/0")
    assert plain.place == RedisEndpoint.from_url("rediss://cache:6379/0", username="u", password="p").place
    cluster = RedisEndpoint.from_url("redis-cluster://a:1,b:2")
    assert cluster.place == RedisEndpoint.from_url("redis-cluster://b:2,a:1").place
    places = {plain.place, cluster.place} | {
        RedisEndpoint.from_url(url).place
        for url in (
            "redis://cache:6379/1",
            "redis://cache:6380/0",
            "redis://other:6379/0",
            "redis-sentinel://cache:6379/main",
            "redis-sentinel://cache:6379/other",
            "unix:///run/cache.sock",
        )
    }
    assert len(places) == 8


def test_a_loopback_address_is_another_place_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = ["redis://127.0.0.1:6379/0", "redis://localhost:6379/0", "redis://[::1]:6379/0", "unix:///run/cache.sock"]
    here = [RedisEndpoint.from_url(url).place for url in urls]
    away = RedisEndpoint.from_url("redis://cache:6379/0").place
    assert here == [RedisEndpoint.from_url(url).place for url in urls]
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert not set(here) & {RedisEndpoint.from_url(url).place for url in urls}
    assert away == RedisEndpoint.from_url("redis://cache:6379/0").place
