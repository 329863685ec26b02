from __future__ import annotations

import pytest

from spillway_connector.errors import ConfigError
from spillway_connector.tiers.redis_endpoint import RedisEndpoint


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
     "unix://", "redis://h?db=1", "redis://h:99999"],
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
