"""Reusing events: creating one costs a driver call, and a device has a limited number of them."""

from __future__ import annotations

from typing import Protocol

from spillway_connector.errors import DeviceCopyError


class EventRuntime(Protocol):
    """The events of a device's runtime. Both methods raise DeviceCopyError."""

    @property
    def events_are_reusable(self) -> bool: ...
    def create_event(self, flag: int) -> int: ...
    def destroy_event(self, event: int) -> None: ...


class ReusedEvents:
    """Events of one flag. Bounded by the jobs in flight, as each job takes a fixed number."""

    def __init__(self, runtime: EventRuntime, flag: int) -> None:
        self._runtime = runtime
        self._flag = flag
        self._idle: list[int] = []
        self._retired: list[int] = []

    @property
    def reusable(self) -> bool:
        """Whether an event may be recorded again while a stream still waits for its record before."""
        return self._runtime.events_are_reusable

    def take(self) -> int:
        """An idle event or a new one. Raises DeviceCopyError."""
        return self._idle.pop() if self._idle else self._runtime.create_event(self._flag)

    def give_back(self, event: int) -> None:
        """Return an event that nothing on the device waits for any more."""
        if self._runtime.events_are_reusable:
            self._idle.append(event)
        else:
            # An older runtime's event must be reset on a stream before it is recorded again; a new one is cheaper.
            self._destroy(event)

    def retire(self, event: int) -> None:
        """Return an event that a stream may still wait for: kept until `close`, after the stream's end."""
        if self._runtime.events_are_reusable:
            self._idle.append(event)  # a wait keeps the record it saw, so recording it again is safe
        else:
            self._retired.append(event)

    def close(self) -> None:
        for event in self._idle + self._retired:
            self._destroy(event)
        self._idle, self._retired = [], []

    def _destroy(self, event: int) -> None:
        try:
            self._runtime.destroy_event(event)
        except DeviceCopyError:
            pass  # of a device that is gone; nothing is left to free
