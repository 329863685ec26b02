"""One connection to a Redis server: blocking, with a deadline on every wait, and large values moved without a copy.

redis-py and hiredis assemble a whole reply before anyone sees it, which costs a copy and halves the rate of a 3 MB GET;
here a value is received straight into the caller's buffer and sent straight from it.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator, Sequence

from spillway_connector.errors import (
    CorruptReason,
    RefusedReason,
    TierCorrupt,
    TierMiss,
    TierRefused,
    TierTimeout,
    TierUnreachable,
    UnreachableReason,
)
from spillway_connector.tiers.redis.client.dial import dial
from spillway_connector.tiers.redis.client.endpoint import Address, RedisEndpoint
from spillway_connector.tiers.redis.client.resolve import SYSTEM
from spillway_connector.tiers.redis.client.resp import (
    ErrorReply,
    Incomplete,
    ProtocolError,
    Push,
    Reply,
    encode_command,
    parse_length,
    parse_reply,
    read_line,
)
from spillway_connector.tiers.tier import Clock

_STEP_BYTES = 4096  # read at once while looking for a line: the little of a value caught in it is copied
# Of a value, read at once at most: what arrived() is told of is then still in the processor's caches.
_STRETCH_BYTES = 512 * 1024
_VALUE_BYTES_MAX = 512 * 1024 * 1024  # Redis' own limit

_REFUSALS = {
    "OOM": RefusedReason.OUT_OF_MEMORY,
    "READONLY": RefusedReason.READ_ONLY,
    "NOREPLICAS": RefusedReason.READ_ONLY,
    "MISCONF": RefusedReason.READ_ONLY,
    "NOPERM": RefusedReason.PERMISSION,
    "NOAUTH": RefusedReason.AUTHENTICATION,
    "WRONGPASS": RefusedReason.AUTHENTICATION,
    "LOADING": RefusedReason.LOADING,
    "MASTERDOWN": RefusedReason.LOADING,
    "TRYAGAIN": RefusedReason.LOADING,
    "BUSY": RefusedReason.LOADING,
    "MOVED": RefusedReason.MOVED,
    "ASK": RefusedReason.MOVED,
    "CLUSTERDOWN": RefusedReason.MOVED,
    "CROSSSLOT": RefusedReason.MOVED,
}


class Redirected(TierRefused):
    """The key lives on ``address`` now (MOVED), or this once (``ask``: its slot is on its way there)."""

    def __init__(self, slot: int, address: Address, *, ask: bool, message: str) -> None:
        super().__init__(RefusedReason.MOVED, message)
        self.slot = slot
        self.address = address
        self.ask = ask


class WrongType(TierRefused):
    """Something other than a string lies at the key: a list, a hash, a sorted set."""

    def __init__(self, message: str) -> None:
        super().__init__(RefusedReason.OTHER, message)


def refusal(endpoint: RedisEndpoint, error: ErrorReply) -> TierRefused:
    """The tier error that stands for an error reply."""
    if error.code in ("MOVED", "ASK"):
        match error.message.split(" "):
            case [_, slot, place] if slot.isascii() and slot.isdigit():
                host, _, port = place.rpartition(":")
                if port.isascii() and port.isdigit() and int(port) < 1 << 16:
                    # An empty host means: the one you are asking.
                    address = Address(host or endpoint.host, int(port))
                    ask = error.code == "ASK"
                    return Redirected(int(slot), address, ask=ask, message=f"{endpoint}: {error.message}")
    if error.code == "WRONGTYPE":
        return WrongType(f"{endpoint}: {error.message}")
    return TierRefused(_REFUSALS.get(error.code, RefusedReason.OTHER), f"{endpoint}: {error.message}")


class RedisConnection:
    """Not for several threads at once. After any error but TierMiss, TierRefused (of the server) and TierCorrupt with
    ``usable`` still true, the connection must be closed: an answer may still be on its way.
    """

    def __init__(self, endpoint: RedisEndpoint, clock: Clock, deadline: float) -> None:
        """Connect, log in and choose the database. Raises TierUnreachable, TierTimeout, TierRefused."""
        self.endpoint = endpoint
        self.usable = False
        self.answered = False  # whether the current command got any byte back; a stale connection never does
        self._clock = clock
        self._received = bytearray()
        self._step = bytearray(_STEP_BYTES)
        self._socket, address = dial(endpoint, clock, deadline)
        name = Address(endpoint.host, endpoint.port)
        try:
            self._log_in(deadline)
        except BaseException as error:
            self.close()
            if address is not None and isinstance(error, TierUnreachable):  # TierTimeout is one
                SYSTEM.avoid(name, address)
            raise
        if address is not None:
            SYSTEM.prefer(name, address)
        self.usable = True

    def close(self) -> None:
        """Also from another thread: a wait in progress ends at once."""
        self.usable = False
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()

    def command(self, *words: bytes, deadline: float) -> Reply:
        """Send one command and return its reply; an error reply is returned, not raised."""
        return self.pipeline([words], deadline)[0]

    def pipeline(self, commands: list[tuple[bytes, ...]], deadline: float) -> list[Reply]:
        """Send all commands at once and return their replies in order.

        Replies must be small: the server buffers them while we are still sending.
        """
        self._begin()
        self._send([b"".join(encode_command(*words) for words in commands)], deadline)
        replies = [self._reply(deadline) for _ in commands]
        self.usable = True
        return replies

    def send_value(self, parts: list[bytes | memoryview], deadline: float) -> Reply:
        """Send one command given as ready-made pieces (the value among them) and return its reply."""
        self._begin()
        self._send(parts, deadline)
        reply = self._reply(deadline)
        self.usable = True
        return reply

    def receive_value(self, command: tuple[bytes, ...], targets: list[memoryview], deadline: float) -> None:
        """Send a command whose reply is one bulk string and receive it straight into ``targets``, filling all.

        Raises TierMiss for null, TierRefused for an error reply, TierCorrupt: SHORT or LENGTH when the value has
        another size than the targets together (the connection is then closed rather than drained), MAGIC when what
        lies there is not a string.
        """
        self.receive_values([command], [targets], deadline)

    def receive_values(
        self,
        commands: Sequence[tuple[bytes, ...]],
        targets: Sequence[list[memoryview]],
        deadline: float,
        received: Callable[[int], None] = lambda place: None,
        arrived: Callable[[int, int, memoryview], None] = lambda place, offset, stretch: None,
    ) -> None:
        """The same for several values; the next one is asked for as soon as one is known to be there and to fit.

        So the server goes on sending while ``received`` looks at what has just arrived, and of an absent value only one
        is ever asked for. Where ``received`` raises, an answer is under way and the connection is not usable any more.
        arrived(place, offset, stretch): bytes of a value that are in their place now, from ``offset`` within it on, in
        order and each once; no stretch spans two of its targets. It runs while the server goes on sending.
        """
        self._begin()
        self._send([encode_command(*commands[0])], deadline)
        for place, parts in enumerate(targets):
            self._expect_value(sum(part.nbytes for part in parts), deadline)
            if place + 1 < len(commands):
                self._send([encode_command(*commands[place + 1])], deadline)
            offset = 0
            for part in parts:
                for stretch in self._fill(part, deadline):
                    arrived(place, offset, stretch)
                    offset += stretch.nbytes
            end = bytearray(2)
            for _ in self._fill(memoryview(end), deadline):
                pass
            if end != b"\r\n":
                raise ProtocolError(f"{self.endpoint}: a value without its end")
            self.usable = place + 1 == len(commands)
            received(place)

    def _expect_value(self, needed: int, deadline: float) -> None:
        """Read the announcement of a value of ``needed`` bytes. Raises what :meth:`receive_value` raises."""
        line = self._line(deadline)
        if line[:1] != b"$":
            self._received[:0] = line + b"\r\n"  # not a value: let the general parser say what it is
            reply = self._reply(deadline)
            self.usable = True
            if reply is None:
                raise TierMiss
            if isinstance(reply, ErrorReply):
                error = refusal(self.endpoint, reply)
                if isinstance(error, WrongType):
                    raise TierCorrupt(CorruptReason.MAGIC, str(error)) from error
                raise error
            raise ProtocolError(f"{self.endpoint}: a value was expected, not {type(reply).__name__}")
        length = parse_length(line[1:], _VALUE_BYTES_MAX)
        if length < 0:
            self.usable = True
            raise TierMiss
        if length != needed:
            reason = CorruptReason.SHORT if length < needed else CorruptReason.LENGTH
            raise TierCorrupt(reason, f"{self.endpoint}: the value has {length} bytes, a frame has {needed}")

    def _begin(self) -> None:
        if not self.usable:
            raise TierUnreachable(UnreachableReason.DISCONNECTED, f"{self.endpoint}: the connection is closed")
        self.usable = False  # until the whole answer is in
        self.answered = False
        if self._received:
            raise ProtocolError(f"{self.endpoint}: bytes arrived that answer no command")

    def _log_in(self, deadline: float) -> None:
        commands: list[tuple[bytes, ...]] = []
        password = self.endpoint.current_password()
        if password is not None:
            user = () if self.endpoint.username is None else (self.endpoint.username.encode(),)
            commands.append((b"AUTH", *user, password.encode()))
        if self.endpoint.database:
            commands.append((b"SELECT", b"%d" % self.endpoint.database))
        commands.append((b"PING",))
        self.usable = True
        for reply in self.pipeline(commands, deadline):
            if isinstance(reply, ErrorReply):
                raise refusal(self.endpoint, reply)

    def _send(self, parts: list[bytes | memoryview], deadline: float) -> None:
        views = [memoryview(part) for part in parts if len(part)]
        try:
            encrypted = isinstance(self._socket, ssl.SSLSocket)  # has no sendmsg; it copies into its records anyway
            while views:
                self._socket.settimeout(self._remaining(deadline))
                sent = self._socket.send(views[0]) if encrypted else self._socket.sendmsg(views)
                while views and sent >= views[0].nbytes:
                    sent -= views.pop(0).nbytes
                if sent:
                    views[0] = views[0][sent:]
        except TimeoutError as error:
            raise TierTimeout(f"{self.endpoint}: the deadline passed while sending") from error
        except OSError as error:
            raise self._lost(error) from error

    def _reply(self, deadline: float) -> Reply:
        while True:
            try:
                reply, end = parse_reply(self._received)
            except Incomplete:
                self._receive_some(deadline)
                continue
            del self._received[:end]
            if not isinstance(reply, Push):
                return reply

    def _line(self, deadline: float) -> bytes:
        while True:
            try:
                line, end = read_line(self._received, 0)
            except Incomplete:
                self._receive_some(deadline)
                continue
            del self._received[:end]
            return line

    def _fill(self, target: memoryview, deadline: float) -> Iterator[memoryview]:
        """Receive until ``target`` is full; yields each stretch of it that has been filled."""
        filled = min(len(self._received), target.nbytes)
        if filled:
            target[:filled] = self._received[:filled]
            del self._received[:filled]
            yield target[:filled]
        while filled < target.nbytes:
            count = self._receive_into(target[filled : filled + _STRETCH_BYTES], deadline)
            yield target[filled : filled + count]
            filled += count

    def _receive_some(self, deadline: float) -> None:
        count = self._receive_into(memoryview(self._step), deadline)
        self._received += self._step[:count]

    def _receive_into(self, target: memoryview, deadline: float) -> int:
        try:
            self._socket.settimeout(self._remaining(deadline))
            count = self._socket.recv_into(target)
        except TimeoutError as error:
            raise TierTimeout(f"{self.endpoint}: the deadline passed while receiving") from error
        except OSError as error:
            raise self._lost(error) from error
        if count == 0:
            raise TierUnreachable(UnreachableReason.DISCONNECTED, f"{self.endpoint}: the server closed the connection")
        self.answered = True
        return count

    def _lost(self, error: OSError) -> TierUnreachable:
        reason = UnreachableReason.TLS if isinstance(error, ssl.SSLError) else UnreachableReason.DISCONNECTED
        return TierUnreachable(reason, f"{self.endpoint}: {error.strerror or error}")

    def _remaining(self, deadline: float) -> float:
        remaining = deadline - self._clock()
        if remaining <= 0:
            raise TimeoutError  # settimeout(0) would mean "do not block" and surface as another error
        return remaining
