"""The interface through which the CPU tier asks late stores (engine/features/late_stores.py) what the device holds
too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from vllm.v1.kv_offload.base import OffloadKey, ReqContext


class Duplicates(Protocol):
    """Chunks that the device holds too. They leave the CPU tier before others, behind what sessions that are gone have
    left."""

    def take_spare(self, count: int, may_leave: Callable[[OffloadKey], bool], /) -> list[tuple[OffloadKey, ReqContext]]:
        """Return up to `count` chunks that the device keeps, each with the request that used it last.

        Args:
            count: The rows that are needed.
            may_leave: Whether the CPU tier can give a chunk up now.
        """

    def put_back(self, spare: list[tuple[OffloadKey, ReqContext]], /) -> None:
        """Take these chunks back: they stay in the CPU tier after all."""

    def gave_up(
        self, spare: list[tuple[OffloadKey, ReqContext]], gone: list[OffloadKey], others: list[OffloadKey], /
    ) -> None:
        """Note that these chunks have left the CPU tier.

        Args:
            spare: Some of those that were taken.
            gone: What sessions that are gone have left.
            others: The oldest, which the device may hold as well.
        """
