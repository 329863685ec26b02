"""The shared tier seen from outside: what really lies in the directory or in Valkey."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import redis


class SharedStore(Protocol):
    tier: str

    def frames(self) -> int:
        """How many blocks are stored whole."""
        ...

    def clear(self) -> None: ...

    def make_room(self) -> None:
        """Tests count what is added: nothing may be evicted for it. For moments in which nothing stored is needed."""
        ...


class NvmeStore:
    tier = "nvme"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*/??/??/*.kv"))

    def frames(self) -> int:
        return len(self.files())

    def clear(self) -> None:
        for file in self.files():
            file.unlink()

    def make_room(self) -> None:
        pass  # its limit is set beyond what any run stores


class ValkeyStore:
    tier = "redis"

    def __init__(self, url: str) -> None:
        self.server = redis.Redis.from_url(url, socket_timeout=5.0, socket_connect_timeout=5.0)

    def keys(self) -> list[bytes]:
        return sorted(key for key in self.server.scan_iter(match="spillway1:*", count=1000) if b":document" not in key)

    def frames(self) -> int:
        try:
            return len(self.keys())
        except redis.RedisError:
            return 0  # away: nothing can be said to be stored

    def clear(self) -> None:
        for key in self.keys():
            self.server.unlink(key)

    def make_room(self) -> None:
        memory = self.server.info("memory")
        if memory["used_memory"] > memory["maxmemory"] / 2:
            self.clear()
