"""The clock of entries' ages, which steps of the wall clock do not change.

It is set once per boot of a node, to the wall clock, and from then on runs with the kernel's monotonic clock. The
node's processes share that setting through a small file in the directory, ``clock.<boot>``. So a wall clock that is set
forward or back by hours while the node runs neither expires entries nor keeps them alive. Only the wall clock measures
the time that a node is down. Entries whose last use then lies in the future count as used now, so that they expire.
"""

from __future__ import annotations

import struct
from pathlib import Path

import xxhash

from spillway_connector.own_files import first_written, unlink_own
from spillway_connector.tiers.tier import Clock, WallClock

CLOCK_PREFIX = "clock."
FUTURE_SLACK_SECONDS = 3600  # an entry used further ahead than this was stamped by a wrong clock
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_OTHERS_KEPT_SECONDS = 90 * 86_400.0
_SETTING = struct.Struct("<8sqq")  # magic, age clock at some moment, monotonic clock at that moment; nanoseconds
_MAGIC = b"SPILLCLK"


def boot_tag() -> str | None:
    """16 hex digits that identify this boot of this node; None if the kernel has no boot id."""
    try:
        return xxhash.xxh3_64_hexdigest(_BOOT_ID.read_bytes())
    except OSError:
        return None


class AgeClock:
    """Seconds and nanoseconds since 1970, if the wall clock was right when this clock was set.

    Private to the process until :meth:`share`. Safe from several threads.
    """

    def __init__(self, root: Path, clock: Clock, wall_clock: WallClock) -> None:
        self._root = root
        self._clock = clock
        self._wall_clock = wall_clock
        self._ahead_ns = self._wall_ns() - self._clock_ns()

    def now(self) -> float:
        """Return the seconds, to a fraction of a microsecond."""
        return self.now_ns() / 1e9

    def now_ns(self) -> int:
        return max(0, self._clock_ns() + self._ahead_ns)

    def now_s(self) -> int:
        """Return whole seconds, which fit into 32 unsigned bits."""
        return min(self.now_ns() // 10**9, (1 << 32) - 1)

    def share(self) -> None:
        """Take over the node's setting, or make this one the node's. In a read-only directory, keep it."""
        boot = boot_tag()
        if boot is None:
            return
        path = self._root / f"{CLOCK_PREFIX}{boot}"
        try:
            raw = first_written(path, _is_setting, lambda: self._setting(path))
        except OSError:
            return
        if raw is not None:
            magic, age_ns, clock_ns = _SETTING.unpack_from(raw)
            # A monotonic clock that is behind the setting belongs to another time namespace or a restored machine.
            if magic == _MAGIC and self._clock_ns() >= clock_ns:
                self._ahead_ns = age_ns - clock_ns

    def _setting(self, path: Path) -> bytes:
        """Write this clock's setting for a boot that has none, and remove those of earlier boots."""
        self._sweep(path)
        fields = _SETTING.pack(_MAGIC, self.now_ns(), self._clock_ns())
        return fields + xxhash.xxh3_64_digest(fields)

    def _sweep(self, current: Path) -> None:
        for path in self._root.glob(f"{CLOCK_PREFIX}*"):
            try:
                if path != current and self.now_ns() / 1e9 - path.lstat().st_mtime > _OTHERS_KEPT_SECONDS:
                    unlink_own(path, 1)
            except OSError:
                continue

    def _clock_ns(self) -> int:
        return int(self._clock() * 1e9)

    def _wall_ns(self) -> int:
        return int(self._wall_clock() * 1e9)


def _is_setting(raw: bytes) -> bool:
    return len(raw) == _SETTING.size + 8 and xxhash.xxh3_64_digest(raw[: _SETTING.size]) == raw[_SETTING.size :]
