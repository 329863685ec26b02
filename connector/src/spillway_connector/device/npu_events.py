"""Events for reuse: creating one costs a call into the driver, and a device has a limited number of them."""

from __future__ import annotations

from spillway_connector.device.acl import Acl, AclError


class EventPool:
    """Events of one flag. Bounded by the jobs in flight, as each job takes a fixed number."""

    def __init__(self, acl: Acl, flag: int) -> None:
        self._acl = acl
        self._flag = flag
        self._idle: list[int] = []
        self._retired: list[int] = []

    def take(self) -> int:
        """Raises AclError."""
        return self._idle.pop() if self._idle else self._acl.create_event(self._flag)

    def give_back(self, event: int) -> None:
        """Only when nothing on the device waits for it any more."""
        if self._acl.events_are_reusable:
            self._idle.append(event)
        else:
            # An older runtime's event must be reset on a stream before it is recorded again; a new one is cheaper.
            self._destroy(event)

    def retire(self, event: int) -> None:
        """It may still be waited for: keep it until `close`, when the stream is gone."""
        if self._acl.events_are_reusable:
            self._idle.append(event)  # a wait keeps the record it saw, so recording it anew is safe
        else:
            self._retired.append(event)

    def close(self) -> None:
        for event in self._idle + self._retired:
            self._destroy(event)
        self._idle, self._retired = [], []

    def _destroy(self, event: int) -> None:
        try:
            self._acl.destroy_event(event)
        except AclError:
            pass  # of a device that is gone; nothing is left to free
