"""Fake engines that are always stopped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from spillway_gateway.testing.fake_engine import FakeEngine
from spillway_gateway.upstream import suspects

StartEngine = Callable[..., Awaitable[FakeEngine]]


def auth_files(folder: Path, tenants: Sequence[Mapping[str, Any]], **settings: Any) -> dict[str, Any]:
    """A gateway's `auth` with these tenants' keys, whose files lie in the folder."""
    (folder / "keys.yaml").write_text(yaml.safe_dump({"tenants": list(tenants)}))
    (folder / "salt").write_text("s" * 32)
    return {"keysFile": str(folder / "keys.yaml"), "saltSecretFile": str(folder / "salt"), **settings}


@pytest.fixture(autouse=True)
def engines_are_looked_at_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake engine that ends breaks its connections and closes its port in one step."""
    monkeypatch.setattr(suspects, "LOOK_AGAIN_SECONDS", 0.0)


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    started: list[FakeEngine] = []

    async def start(name: str = "fake-0", port: int = 0, **settings: Any) -> FakeEngine:
        engine = FakeEngine(name=name, **settings)
        await engine.start(port)
        started.append(engine)
        return engine

    yield start
    for engine in started:
        await engine.stop()
        if engine.publisher is not None:
            engine.publisher.close()
