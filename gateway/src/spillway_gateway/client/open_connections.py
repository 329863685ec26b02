"""The connections of one listener: how many there may be, whose they are, and which are over.

Nothing here waits or has a timer of its own: tick() looks at every connection once a second, and ends those that are
over a few at a time, as thousands may be over at once. A full listener makes room by ending the connection that has
waited longest for its client to send a request, so silent clients cannot keep others out; only where every connection
is at work a new one is refused.
"""

from __future__ import annotations

import itertools
from typing import Protocol

from spillway_gateway.client.body_budget import BodyRoom
from spillway_gateway.config.connections import ConnectionsConfig

LOOK_SECONDS = 1.0
ENDED_PER_TICK = 32


class Connection(Protocol):
    """One that is open."""

    def is_over(self, now: float) -> bool:
        """Whether a deadline has passed. now: seconds of the event loop's clock."""

    def end(self, now: float) -> None:
        """Where it is still over."""

    def make_room(self) -> None:
        """End it at once."""


class OpenConnections:
    """Of one listener. open_max: of all addresses together; one address gets three quarters of them at most."""

    def __init__(self, bounds: ConnectionsConfig, open_max: int) -> None:
        self.bounds = bounds
        self.open_max = open_max
        self.per_address_max = min(bounds.per_address_max, max(1, open_max * 3 // 4))
        self.body_room = BodyRoom()
        self.refused_total = 0
        self.ended_for_room_total = 0
        self._address: dict[Connection, str] = {}
        self._of_address: dict[str, int] = {}
        # For a request's head, since longest first: all of them, and those of each address.
        self._waiting: dict[Connection, None] = {}
        self._waiting_of: dict[str, dict[Connection, None]] = {}
        self._over: dict[Connection, None] = {}
        self._look_at = 0.0

    def __len__(self) -> int:
        return len(self._address)

    def admit(self, connection: Connection, address: str) -> bool:
        """Whether a new connection may stay; it then waits for a request, until leave()."""
        if self._of_address.get(address, 0) >= self.per_address_max:
            if not self._make_room(self._waiting_of.get(address, {})):
                return False
        elif len(self._address) >= self.open_max and not self._make_room(self._waiting):
            return False
        self._address[connection] = address
        self._of_address[address] = self._of_address.get(address, 0) + 1
        self.waits(connection)
        return True

    def _make_room(self, waiting: dict[Connection, None]) -> bool:
        longest = next(iter(waiting), None)
        if longest is None:
            self.refused_total += 1
            return False
        self.ended_for_room_total += 1
        self.leave(longest)
        longest.make_room()
        return True

    def hand_over(self, connection: Connection, successor: Connection) -> bool:
        """The successor takes the place of an admitted connection; False where it has left since."""
        if connection not in self._address:
            return False
        self.works(connection)
        self._address[successor] = self._address.pop(connection)
        self.waits(successor)
        return True

    def leave(self, connection: Connection) -> None:
        """It has ended. Does nothing where it was not admitted."""
        if connection not in self._address:
            return
        self.works(connection)
        address = self._address.pop(connection)
        left = self._of_address[address] - 1
        if left:
            self._of_address[address] = left
        else:
            del self._of_address[address]
            self._waiting_of.pop(address, None)

    def works(self, connection: Connection) -> None:
        """The head of a request is there."""
        if connection in self._waiting:
            del self._waiting[connection]
            del self._waiting_of[self._address[connection]][connection]

    def waits(self, connection: Connection) -> None:
        """For its client's next request."""
        address = self._address.get(connection)
        if address is not None:
            self._waiting[connection] = None
            self._waiting_of.setdefault(address, {})[connection] = None

    def tick(self, now: float) -> None:
        """Called some times a second."""
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._over.update((connection, None) for connection in self._address if connection.is_over(now))
        for connection in list(itertools.islice(self._over, ENDED_PER_TICK)):
            del self._over[connection]
            if connection in self._address:
                connection.end(now)
