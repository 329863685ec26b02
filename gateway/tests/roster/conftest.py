"""Fixtures for several modules of this room."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from spillway_gateway.testing.fake_kubernetes import FakeKubernetes


@pytest.fixture
async def api() -> AsyncIterator[FakeKubernetes]:
    made = FakeKubernetes()
    await made.start()
    yield made
    await made.stop()
