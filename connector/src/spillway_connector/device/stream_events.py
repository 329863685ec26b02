"""Events for reuse: creating one costs a call into the driver, and a device has a limited number of them."""

from __future__ import annotations

from typing import Protocol

from spillway_connector.errors import DeviceCopyError


class EventRuntime(Protocol):
    """Both methods raise DeviceCopyError."""

    @property
    def events_are_reusable(self) -> bool: ...
    def create_event(self, flag: int) -> int: ...
    def destroy_event(self, event: int) -> None: ...


class EventPool:
    """Events of one flag. Bounded by the jobs in flight, as each job takes a fixed number."""

    def __init__(self, runtime: EventRuntime, flag: int) -> None:
        self._runtime = runtime
        self._flag = flag
        self._idle: list[int] = []
        self._retired: list[int] = []

    def take(self) -> int:
        """Raises DeviceCopyError."""
        return self._idle.pop() if self._idle else self._runtime.create_event(self._flag)

    def give_back(self, event: int) -> None:
        """Only when nothing on the device waits for it any more."""
        if self._runtime.events_are_reusable:
            self._idle.append(event)
        else:
            # An older runtime's event must be reset on a stream before it is recorded again; a new one is cheaper.
            self._destroy(event)

    def retire(self, event: int) -> None:
        """It may still be waited for: keep it until `close`, when the stream is gone."""
        if self._runtime.events_are_reusable:
            self._idle.append(event)  # a wait keeps the record it saw, so recording it anew is safe
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
