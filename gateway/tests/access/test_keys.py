from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.access.gatekeeper import Gatekeeper
from spillway_gateway.access.keys import KeyRing, Priority, hash_key, parse_keys, read_keys
from spillway_gateway.access.limits import Settlement, TenantUsage, give_back, settle
from spillway_gateway.config.settings import AuthConfig
from spillway_gateway.errors import ConfigError, KeyMissing, KeyUnknown, ModelForbidden, TenantLimited

KEY_A, KEY_B = "sk-a" + "0" * 40, "sk-b" + "0" * 40


def document(**of_a: object) -> dict[str, object]:
    return {"tenants": [{"name": "a", "keys": [hash_key(KEY_A)], **of_a}, {"name": "b", "keys": [hash_key(KEY_B)]}]}


def ring(**of_a: object) -> KeyRing:
    return parse_keys(document(**of_a), "keys")


def gatekeeper(folder: Path, **of_a: object) -> Gatekeeper:
    (folder / "keys.yaml").write_text(yaml.safe_dump(document(**of_a)))
    (folder / "salt").write_text("s" * 32)
    return Gatekeeper(AuthConfig(str(folder / "keys.yaml"), str(folder / "salt")), clock=lambda: 0.0)


def test_keys_lead_to_their_tenants_and_to_no_other() -> None:
    keys = ring(models=["m"], priority="high", concurrentRequestsMax=3, promptTokensPerMinute=100)

    a, b = keys.tenant_of(KEY_A.encode()), keys.tenant_of(KEY_B.encode())
    assert a is not None and b is not None
    assert (a.name, a.priority, a.concurrent_requests_max, a.prompt_tokens_per_minute) == ("a", Priority.HIGH, 3, 100)
    assert a.may_use("m") and not a.may_use("other") and b.may_use("other")
    assert (b.concurrent_requests_max, b.prompt_tokens_per_minute) == (None, None)


@given(st.binary(max_size=600))
def test_no_other_bytes_are_a_key(key: bytes) -> None:
    assert ring().tenant_of(key) is None


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=8) | st.sampled_from([hash_key(KEY_A), "sha256:"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["tenants", "name", "keys", "models", "priority"]), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_any_document_is_a_ring_or_a_named_error(value: object) -> None:
    try:
        assert isinstance(parse_keys(value, "keys"), KeyRing)
    except ConfigError as error:
        assert str(error).startswith("keys: ")
        assert hash_key(KEY_A) not in str(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"concurrentRequestsMax": 0}, "concurrentRequestsMax: a whole number above 0"),
        ({"priority": "urgent"}, "'urgent' given; high, normal or low"),
        ({"keys": ["plain"]}, r"tenants\[0\].keys\[0\]: 'sha256:'"),
        ({"tokensPerMinute": "many"}, "tokensPerMinute: a whole number above 0"),
        ({"operator": "yes"}, "operator: true or false"),
        ({"retentionSecondsMax": -1}, "retentionSecondsMax: a number from 0 to 604800"),
        ({"retentionTierShare": 0.6}, "retentionTierShare: a number from 0 to 0.5"),
        ({"retentionTierShare": True}, "retentionTierShare: a number from 0 to 0.5"),
        ({"quota": 1}, "no other settings than"),
        ({"name": "b"}, "two tenants are named 'b'"),
        ({"keys": [hash_key(KEY_B)]}, "'b' and 'a' have the same key"),
    ],
)
def test_mistakes_in_the_file_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ring(**change)


def test_short_keys_are_refused_when_hashed() -> None:
    with pytest.raises(ConfigError, match="5 bytes given, 24 to 512 needed"):
        hash_key("guess")


def test_a_changed_file_counts_and_a_bad_one_does_not(tmp_path: Path) -> None:
    gate = gatekeeper(tmp_path)
    path = tmp_path / "keys.yaml"
    headers = [(b"authorization", b"Bearer " + KEY_A.encode())]

    path.write_text("tenants: [{name: a}]")
    os.utime(path, ns=(1, 1))
    gate.reload()
    assert gate.tenant_of(headers).name == "a"
    assert (gate.reloads_total, gate.failed_reloads_total) == (0, 1)

    path.write_text(yaml.safe_dump({"tenants": [{"name": "b", "keys": [hash_key(KEY_B)]}]}))
    os.utime(path, ns=(2, 2))
    gate.reload()
    gate.reload()
    assert (gate.reloads_total, gate.failed_reloads_total) == (1, 1)
    with pytest.raises(KeyUnknown):
        gate.tenant_of(headers)


def test_both_header_forms_and_none(tmp_path: Path) -> None:
    gate = gatekeeper(tmp_path, models=["m"])

    assert gate.tenant_of([(b"authorization", b"bearer " + KEY_B.encode())]).name == "b"
    assert gate.tenant_of([(b"x-api-key", KEY_B.encode())]).name == "b"
    for headers in ([], [(b"authorization", b"Basic abc")], [(b"authorization", b"Bearer ")]):
        with pytest.raises(KeyMissing):
            gate.tenant_of(headers)
    with pytest.raises(ModelForbidden):
        gate.allow_model(gate.tenant_of([(b"x-api-key", KEY_A.encode())]), "alias", "other")


def test_files_that_cannot_be_used_stop_the_start(tmp_path: Path) -> None:
    gatekeeper(tmp_path)
    (tmp_path / "salt").write_text("short")
    with pytest.raises(ConfigError, match=r"saltSecretFile .* 5 bytes given, at least 32 needed"):
        Gatekeeper(AuthConfig(str(tmp_path / "keys.yaml"), str(tmp_path / "salt")))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "absent.yaml")


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 3_000)), max_size=60))
def test_no_minute_takes_more_than_two_buckets_and_one_prompt(steps: list[tuple[float, int]]) -> None:
    tenant = ring(promptTokensPerMinute=1_000).tenant_of(KEY_A.encode())
    assert tenant is not None
    usage, now, taken = TenantUsage(0.0), 0.0, []
    for pause, tokens in steps:
        now += pause
        try:
            usage.begin(tenant, tokens, now)
            taken.append((now, tokens))
        except TenantLimited as error:
            assert error.retry_after_seconds is not None and error.retry_after_seconds >= 1
    for start, _ in taken:
        window = [tokens for at, tokens in taken if start <= at <= start + 60]
        assert sum(window) - window[-1] <= 2_000 + 1e-6


def test_the_retry_after_is_when_the_next_passes() -> None:
    tenant = ring(promptTokensPerMinute=600).tenant_of(KEY_A.encode())
    assert tenant is not None
    usage = TenantUsage(0.0)
    usage.begin(tenant, 1_000, 0.0)
    with pytest.raises(TenantLimited) as refused:
        usage.begin(tenant, 1, 0.0)

    assert refused.value.retry_after_seconds == 40
    usage.begin(tenant, 1, 40.1)


def test_a_reply_takes_from_the_bucket_of_all_tokens_only() -> None:
    tenant = ring(promptTokensPerMinute=100, tokensPerMinute=100).tenant_of(KEY_A.encode())
    assert tenant is not None
    usage = TenantUsage(0.0)
    usage.begin(tenant, 60, 0.0)
    usage.end(tenant, Settlement(reply_tokens=90), 1.0)
    with pytest.raises(TenantLimited, match="100 tokens per minute") as refused:
        usage.begin(tenant, 1, 1.0)
    assert refused.value.retry_after_seconds == 29
    usage.begin(tenant, 1, 1.1 + refused.value.retry_after_seconds)


def test_the_engines_count_settles_the_estimate() -> None:
    tenant = ring(promptTokensPerMinute=100, tokensPerMinute=100).tenant_of(KEY_A.encode())
    assert tenant is not None
    usage = TenantUsage(0.0)
    usage.begin(tenant, 10, 0.0)
    usage.end(tenant, settle(10, 160, 0), 0.0)  # fewer were estimated than there were
    with pytest.raises(TenantLimited, match="100 prompt tokens") as refused:
        usage.begin(tenant, 1, 0.0)
    assert refused.value.retry_after_seconds == 36

    usage = TenantUsage(0.0)
    usage.begin(tenant, 100, 0.0)
    usage.end(tenant, settle(100, 40, 10), 0.0)  # more
    usage.begin(tenant, 50, 0.0)
    with pytest.raises(TenantLimited, match="100 tokens per minute"):
        usage.begin(tenant, 1, 0.0)
    assert settle(100, None, 7) == Settlement(0, 0, 7)  # no count by the engine


def test_what_no_engine_got_is_given_back_whole() -> None:
    tenant = ring(requestsPerMinute=1, promptTokensPerMinute=100, tokensPerMinute=100).tenant_of(KEY_A.encode())
    assert tenant is not None
    usage = TenantUsage(0.0)
    for _ in range(3):
        usage.begin(tenant, 100, 0.0)
        usage.end(tenant, give_back(100), 0.0)
    usage.begin(tenant, 100, 0.0)
    with pytest.raises(TenantLimited):
        usage.begin(tenant, 1, 0.0)


def test_requests_at_a_time() -> None:
    tenant = ring(concurrentRequestsMax=1).tenant_of(KEY_A.encode())
    assert tenant is not None
    usage = TenantUsage(0.0)
    usage.begin(tenant, 1, 0.0)
    with pytest.raises(TenantLimited, match="1 requests of this tenant"):
        usage.begin(tenant, 1, 0.0)
    usage.end(tenant, Settlement(reply_tokens=5), 0.0)
    usage.begin(tenant, 1, 0.0)


def test_requests_per_minute_are_whole() -> None:
    tenant = ring(requestsPerMinute=2).tenant_of(KEY_A.encode())
    assert tenant is not None and tenant.limited
    usage = TenantUsage(0.0)
    usage.begin(tenant, 10_000, 0.0)
    usage.begin(tenant, 10_000, 0.1)
    with pytest.raises(TenantLimited, match="2 requests per minute") as refused:
        usage.begin(tenant, 1, 0.2)
    assert refused.value.retry_after_seconds == 30
    usage.begin(tenant, 1, 30.1)


async def test_the_reading_of_a_file_is_given_up_with_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings, real_sleep = [], asyncio.sleep
    monkeypatch.setattr(Gatekeeper, "reload", lambda _, reading: readings.append(reading))
    gate = gatekeeper(tmp_path)
    monkeypatch.setattr(asyncio, "sleep", lambda _: real_sleep(0))
    following = asyncio.create_task(gate.follow())
    while not readings:
        await real_sleep(0)
    assert not readings[0].given_up
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert readings[0].given_up
