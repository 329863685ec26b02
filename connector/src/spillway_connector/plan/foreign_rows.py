"""Rows of a node that one engine does not use, and which of them it may take for its own chunks.

Namespaces divide the rows by use, but each keeps a floor of its own: the rows that it used last. A namespace of which
no row was used for an hour keeps none, because its model may have left the node.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FLOOR_KEPT_MS = 3_600_000


class ForeignRows:
    """The ready rows of other namespaces, and those of one's own that are used no longer."""

    def __init__(self, own: bytes, num_rows: int, floor_share: float) -> None:
        """floor_share: the part of all rows that each namespace keeps when another one wants rows."""
        self._own, self._num_rows, self._floor_share = own, num_rows, floor_share
        self._rows: dict[bytes, set[int]] = {}
        self._namespaces: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._namespaces)

    def add(self, row: int, namespace: bytes) -> None:
        self.discard(row)
        self._namespaces[row] = namespace
        self._rows.setdefault(namespace, set()).add(row)

    def discard(self, row: int) -> None:
        namespace = self._namespaces.pop(row, None)
        if namespace is None:
            return
        rows = self._rows[namespace]
        rows.remove(row)
        if not rows:
            del self._rows[namespace]

    def clear(self) -> None:
        self._rows.clear()
        self._namespaces.clear()

    @property
    def floor_rows(self) -> int:
        """Number of rows that each namespace keeps: an equal part of them if the floors exceed the whole."""
        namespaces = len(self._rows.keys() | {self._own})
        return min(int(self._floor_share * self._num_rows), self._num_rows // namespaces)

    def oldest_first(self, used_ms: npt.NDArray[np.uint64], now_ms: int) -> list[int]:
        """The rows that may be taken. used_ms: of all rows of the node."""
        spare: list[npt.NDArray[np.intp]] = []
        for namespace, found in self._rows.items():
            rows = np.fromiter(found, np.intp)
            rows = rows[np.argsort(used_ms[rows], kind="stable")]
            is_kept = namespace != self._own and now_ms - int(used_ms[rows[-1]]) < FLOOR_KEPT_MS
            spare.append(rows[: max(0, len(rows) - self.floor_rows)] if is_kept else rows)
        merged = np.concatenate(spare) if spare else np.empty(0, np.intp)
        ordered: list[int] = merged[np.argsort(used_ms[merged], kind="stable")].tolist()
        return ordered
