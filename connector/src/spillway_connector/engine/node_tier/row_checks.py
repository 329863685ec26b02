"""Checks of a rank, before each copy and after it, that a row of the node holds the chunk to load."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from spillway_connector.errors import DeviceCopyError
from spillway_connector.node.region import NodeRegion

logger = logging.getLogger(__name__)


class NodeRowsSpec(CPULoadStoreSpec):
    """Rows to be loaded, and by what they are recognised before and after the copy."""

    def __init__(self, rows: Any, stamps: Iterable[int], checks: Iterable[int]) -> None:
        super().__init__(rows)
        self.stamps = np.array(stamps, np.uint64)
        self.checks = np.array(checks, np.uint64)


class RowChecks:
    """The checks of a rank: whether rows hold what is to be loaded from them, before each copy and after it."""

    def __init__(self, region: NodeRegion) -> None:
        self._region = region
        self._loading: dict[int, NodeRowsSpec] = {}  # by copy

    def require(self, host: LoadStoreSpec) -> None:
        """Raises DeviceCopyError."""
        if isinstance(host, NodeRowsSpec) and not self._holds(host):
            raise DeviceCopyError(
                "rows of the node's CPU tier were given to other chunks, or cut, before they were loaded"
            )

    def submitted(self, copy_id: int, host: LoadStoreSpec) -> None:
        if isinstance(host, NodeRowsSpec):
            self._loading[copy_id] = host

    def still_held(self, copy_id: int) -> bool:
        """Whether the rows of a copy that has ended held the wanted chunks from its beginning to its end. Once for each
        copy."""
        host = self._loading.pop(copy_id, None)
        if host is None or self._holds(host):
            return True
        logger.warning("KV load %d: rows of the node's CPU tier were given to other chunks, or cut, meanwhile", copy_id)
        return False

    def _holds(self, host: NodeRowsSpec) -> bool:
        index = self._region.index
        return self._region.is_whole and index.holds(host.block_ids.astype(np.intp), host.stamps, host.checks)
