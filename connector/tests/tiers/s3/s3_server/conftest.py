from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from s3_servers import BUCKET, KEYS, S3Server, s3_server

from spillway_connector.namespace import Namespace
from spillway_connector.tiers.s3.place import S3Place
from spillway_connector.tiers.s3.tier import S3Tier

_NUMBERS = count()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One real server for all tests that do not hurt it."""
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        running.make_bucket()
        yield running


@pytest.fixture(autouse=True)
def writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS[1])


@pytest.fixture
def place(server: S3Server) -> S3Place:
    """An empty prefix for each test."""
    return S3Place(BUCKET, prefix=f"test-{next(_NUMBERS)}/", endpoint=server.endpoint)


@pytest.fixture
def tier_at() -> Iterator[Callable[..., S3Tier]]:
    """Makes a tier at a place, with other fields of the place; closed afterwards."""
    tiers: list[S3Tier] = []

    def make(place: S3Place, namespace: Namespace, payload_bytes: int, **other: Any) -> S3Tier:
        tier = S3Tier(namespace, payload_bytes, replace(place, **other))
        tiers.append(tier)
        return tier

    yield make
    for tier in tiers:
        tier.close()
