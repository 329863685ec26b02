"""Reads the configuration file again when it changes or SIGHUP comes; a bad file leaves the old settings in use."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

from msgspec import structs

from spillway_gateway.background import on_daemon_thread
from spillway_gateway.config.certificate import file_state
from spillway_gateway.config.settings import GatewayConfig, load_config, shown_config
from spillway_gateway.config.unique_yaml import Reading
from spillway_gateway.errors import ConfigError
from spillway_settings import shared_names

logger = logging.getLogger(__name__)

LIVE_SECTIONS = frozenset({"models", *shared_names.LIVE_SECTIONS})


class ConfigFollower:
    """path: the file. current: the configuration in use, sections that only a restart applies included. apply: puts a
    checked configuration into effect."""

    def __init__(self, path: Path, current: GatewayConfig, apply: Callable[[GatewayConfig], Awaitable[None]]) -> None:
        self._path = path
        self._apply = apply
        self._wake = asyncio.Event()
        self._asked = False
        self._seen: tuple[int, int, int] | None = None
        self.current = current
        self.applied_total = 0
        self.refused_total = 0
        self.refused_now = False
        self.restart_pending: tuple[str, ...] = ()

    def read_soon(self) -> None:
        """Whether the file looks changed or not."""
        self._asked = True
        self._wake.set()

    async def run(self) -> None:
        """Follow the file until cancelled."""
        period = self.current.reload.period_seconds
        reading = Reading()
        try:
            while True:
                self._wake.clear()
                await self.look(reading)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(period or None):
                        await self._wake.wait()
        finally:
            reading.give_up()

    async def look(self, reading: Reading | None = None) -> None:
        """Look at the file once. A mounted ConfigMap changes by renaming a link, which the inode shows."""
        state = await on_daemon_thread(lambda: file_state(self._path))
        if state == self._seen and not self._asked:
            return
        asked, self._asked, self._seen = self._asked, False, state
        try:
            given = await on_daemon_thread(
                lambda: load_config(self._path, reading)
            )  # the end of the process does not wait for it
        except ConfigError as error:
            self.refused_total += 1
            self.refused_now = True
            logger.error("%s; the configuration read before stays in use", error)
            return
        self.refused_now = False
        effective, self.restart_pending = merge_live(self.current, given)
        if logger.isEnabledFor(logging.DEBUG):
            for name, before, after in differences(shown_config(self.current), shown_config(given)):
                when = "now" if name.split(".")[0] in LIVE_SECTIONS else "after a restart"
                logger.debug("%s: %r becomes %r %s", name, before, after, when)
        if self.restart_pending:
            logger.warning("--config %s: restart to apply: %s", self._path, ", ".join(self.restart_pending))
        if effective == self.current:
            if asked:
                logger.info("--config %s: read again, nothing to change", self._path)
            return
        await self._apply(effective)
        self.current = effective
        self.applied_total += 1
        logger.info("--config %s: applied", self._path)


def differences(before: object, after: object, name: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield the settings that differ, by their dotted names, each with both values; None if one side lacks it."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in {**before, **after}:
            yield from differences(before.get(key), after.get(key), f"{name}.{key}" if name else key)
    elif before != after:
        yield name, before, after


def merge_live(current: GatewayConfig, given: GatewayConfig) -> tuple[GatewayConfig, tuple[str, ...]]:
    """Return `current` with the changes that can be applied now, and the changed sections that cannot. Pure."""
    names = GatewayConfig.__struct_fields__
    changed = {name for name in names if getattr(current, name) != getattr(given, name)}
    live = {name: getattr(given, name) for name in changed & LIVE_SECTIONS}
    pending = tuple(name for name in names if name in changed - LIVE_SECTIONS)
    return structs.replace(current, **live), pending
