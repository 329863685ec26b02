from __future__ import annotations

import pytest

from spillway_connector.tiers.inspection import Damage, StoredFrame
from spillway_connector.tiers.tier import NO_TENANT
from spillway_ctl.frame_filter import FrameFilter, parse_namespace_prefix, parse_tenant, tenant_name, tenant_of_salt

NOW_S = 1_000_000.0
TENANT = bytes(range(1, 9))


def frame(**fields: object) -> StoredFrame:
    given = {"namespace": bytes.fromhex("3f2a" + "00" * 14), "stored_bytes": 10, "place": "here", "handle": None}
    return StoredFrame(**{**given, "tenant": TENANT, "used_s": NOW_S - 100.0, **fields})


def test_each_filter_alone_and_all_together() -> None:
    assert FrameFilter().takes(frame(), NOW_S)
    assert FrameFilter("3f2").takes(frame(), NOW_S) and not FrameFilter("3e").takes(frame(), NOW_S)
    assert FrameFilter(tenant=TENANT).takes(frame(), NOW_S)
    assert not FrameFilter(tenant=NO_TENANT).takes(frame(), NOW_S)
    assert FrameFilter(older_s=99.0).takes(frame(), NOW_S) and not FrameFilter(older_s=100.0).takes(frame(), NOW_S)
    assert FrameFilter(newer_s=101.0).takes(frame(), NOW_S) and not FrameFilter(newer_s=100.0).takes(frame(), NOW_S)
    assert FrameFilter("3f", TENANT, 50.0, 200.0).takes(frame(), NOW_S)
    assert not FrameFilter("3f", NO_TENANT, 50.0, 200.0).takes(frame(), NOW_S)


def test_a_frame_of_unknown_age_is_of_no_age() -> None:
    unknown = frame(used_s=None, created_s=None)
    assert not FrameFilter(older_s=1.0).takes(unknown, NOW_S) and not FrameFilter(newer_s=1e9).takes(unknown, NOW_S)
    assert FrameFilter(older_s=1.0).takes(frame(used_s=None, created_s=NOW_S - 2.0), NOW_S)


def test_a_damaged_header_names_no_tenant() -> None:
    damaged = frame(damage=Damage("header", "spoiled"))
    assert not FrameFilter(tenant=TENANT).takes(damaged, NOW_S)
    assert FrameFilter("3f").takes(damaged, NOW_S)


def test_what_a_filter_asks_of_a_walk() -> None:
    assert FrameFilter().is_everything and not FrameFilter("3f").is_everything
    assert FrameFilter("3f").whole_namespaces and not FrameFilter("3f", older_s=1.0).whole_namespaces
    assert FrameFilter(tenant=TENANT).needs_headers and not FrameFilter(older_s=1.0).needs_headers


def test_it_says_what_it_takes() -> None:
    assert str(FrameFilter()) == "of all namespaces"
    assert str(FrameFilter("3f", TENANT, 604_800.0)) == "of namespace 3f... of tenant 0102030405060708 older than 7 d"


def test_tenants_are_digits_or_default() -> None:
    assert parse_tenant("default") == NO_TENANT and parse_tenant(TENANT.hex()) == TENANT
    assert tenant_name(NO_TENANT) == "default" and tenant_name(TENANT) == TENANT.hex()
    for wrong in ("", "0102", "customer-7", "0102030405060708ff"):
        with pytest.raises(ValueError, match="16 hex digits"):
            parse_tenant(wrong)


def test_namespaces_are_the_first_digits() -> None:
    assert parse_namespace_prefix("3F2a") == "3f2a"
    for wrong in ("", "xyz", "0" * 33):
        with pytest.raises(ValueError, match="hex digits"):
            parse_namespace_prefix(wrong)


def test_a_salt_gives_the_tenant_that_engines_compute() -> None:
    # The first 8 bytes of `printf customer-7 | b3sum`: part of the format of stored frames.
    assert tenant_of_salt("customer-7").hex() == "c0b04ee956b3fe09"
