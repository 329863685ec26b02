"""What the CPU tier asks of late stores, which know what the device holds as well (engine/features/late_stores.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from vllm.v1.kv_offload.base import OffloadKey, ReqContext


class Duplicates(Protocol):
    """Chunks that the device holds too. A room is made by these before others, behind what is gone."""

    def take_spare(
        self, count: int, may_leave: Callable[[OffloadKey], bool], /
    ) -> list[tuple[OffloadKey, ReqContext]]: ...

    def put_back(self, spare: list[tuple[OffloadKey, ReqContext]], /) -> None: ...

    def gave_up(
        self, spare: list[tuple[OffloadKey, ReqContext]], gone: list[OffloadKey], others: list[OffloadKey], /
    ) -> None: ...
