from __future__ import annotations

from collections.abc import Iterator

import pytest
from acl_emulator import build
from acl_emulator.control import Emulator

from spillway_connector.device.npu.acl import Acl


def _emulator(without: tuple[str, ...]) -> Iterator[Emulator]:
    emulator = Emulator(build.library(without))
    emulator.reset()
    yield emulator
    live = emulator.live()
    emulator.reset()
    assert (live.streams, live.events, live.host_registrations, live.device_allocations) == (0, 0, 0, 0), live


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    """CANN 9.1 with every documented function. The test must give back what it takes."""
    yield from _emulator(build.EVERYTHING)


@pytest.fixture
def emulator_8_3() -> Iterator[Emulator]:
    yield from _emulator(build.CANN_8_3)


@pytest.fixture
def emulator_old_events() -> Iterator[Emulator]:
    yield from _emulator(build.OLD_EVENTS)


@pytest.fixture
def acl(emulator: Emulator) -> Acl:
    acl = Acl(str(emulator.path))
    acl.set_device(0)
    return acl
