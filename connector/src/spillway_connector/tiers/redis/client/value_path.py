"""The value path: commands and large values, sent from and received into the caller's memory within a deadline.

redis-py encodes commands and parses replies. It assembles a whole reply before it returns it, which costs a copy and
halves the rate of a 3 MB GET, so values bypass its parser. See deadline_socket.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from hiredis import pack_command
from redis.connection import Connection
from redis.exceptions import InvalidResponse, RedisError, ResponseError

from spillway_connector.errors import (
    CorruptReason,
    TierCorrupt,
    TierError,
    TierMiss,
    TierRefused,
    TierUnreachable,
    UnreachableReason,
)
from spillway_connector.tiers.borrow import Span
from spillway_connector.tiers.redis.client.deadline_socket import DeadlineSocket
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.client.errors import Reply, WrongType, accepted, refusal, tier_error

_Result = TypeVar("_Result")
_encode = cast("Callable[[tuple[bytes, ...]], bytes]", pack_command)


class ValueConnection(Connection):
    """A connection for one thread at a time. Every command raises TierRefused, TierUnreachable, TierTimeout.

    An error other than TierMiss and an error reply closes the connection, because a reply may be under way; so does
    TierCorrupt, unless the whole reply was read. ``answered``: whether any byte of the reply to the last command came.
    options: redis-py's.
    """

    def __init__(self, *, endpoint: RedisEndpoint, **options: Any) -> None:
        super().__init__(host=endpoint.host, port=endpoint.port, db=endpoint.database, **options)
        self.endpoint = endpoint
        self.answered = False
        self._settled = True  # no reply is under way

    def command(self, *words: bytes, deadline: float) -> Reply:
        """Send one command and return its reply."""
        return accepted(self.pipeline([words], deadline)[0])

    def pipeline(self, commands: Sequence[tuple[bytes, ...]], deadline: float) -> list[Reply | TierRefused]:
        """Send all commands at once and return their replies in order, TierRefused in the place of an error reply.

        Replies must be small: the server buffers them while commands are still being sent.
        """

        def exchange(sock: DeadlineSocket) -> list[Reply | TierRefused]:
            sock.send([b"".join([_encode(words) for words in commands])])
            replies = self._replies(len(commands))
            self._settled = True
            return replies

        return self._exchange(exchange, deadline)

    def send_value(self, parts: Sequence[bytes | Span], deadline: float) -> Reply:
        """Send one command that is encoded already (see :func:`encode_set`) and return its reply.

        Raises TierRefused(CLOSED) if a span was taken back before all of it was sent.
        """

        def exchange(sock: DeadlineSocket) -> Reply:
            sock.send(parts)
            replies = self._replies(1)
            self._settled = True
            return accepted(replies.pop())

        return self._exchange(exchange, deadline)

    def receive_value(self, command: tuple[bytes, ...], targets: list[memoryview], deadline: float) -> None:
        """Send a command whose reply is one bulk string and receive it straight into ``targets``, filling all.

        Raises TierMiss for null; TierCorrupt: SHORT or LENGTH when the value has another size than the targets
        together (the rest of it is not read), MAGIC when the key holds no string.
        """
        self.receive_values([command], [[Span.of(target) for target in targets]], deadline)

    def receive_values(
        self,
        commands: Sequence[tuple[bytes, ...]],
        targets: Sequence[Sequence[Span]],
        deadline: float,
        received: Callable[[int], None] = lambda place: None,
        arrived: Callable[[int, int, memoryview], None] = lambda place, offset, stretch: None,
    ) -> None:
        """The same for several values; each is requested once the one before it is known to exist and to fit.

        So the server keeps sending while ``received(place)`` checks a complete value, and of absent values only one is
        ever requested. Where ``received`` raises before the last value, the connection is closed.
        arrived(place, offset, stretch): bytes of a value that are in place now, from ``offset`` within it, in order
        and each once; no stretch spans two of its targets. It runs while the server keeps sending, within the borrow.
        Raises TierRefused(CLOSED) if a target was taken back.
        """

        def exchange(sock: DeadlineSocket) -> None:
            sock.send([_encode(commands[0])])
            for place, parts in enumerate(targets):
                self._expect_value(sock, sum(part.nbytes for part in parts))
                if place + 1 < len(commands):
                    sock.send([_encode(commands[place + 1])])
                _fill(sock, parts, partial(arrived, place))
                end = bytearray(2)
                _fill(sock, [Span.of(memoryview(end))])
                if end != b"\r\n":
                    raise InvalidResponse("a value without its end")
                self._settled = place + 1 == len(commands)
                received(place)

        self._exchange(exchange, deadline)

    def _exchange(self, exchange: Callable[[DeadlineSocket], _Result], deadline: float) -> _Result:
        """Run ``exchange``; if it raises, close the connection unless all replies were read."""
        sock = self._sock
        if sock is None:
            raise TierUnreachable(UnreachableReason.DISCONNECTED, f"{self.endpoint}: the connection is closed")
        sock.begin(deadline)
        self._settled = False
        try:
            if sock.unread or self._parser._buffer.unread_bytes():
                raise InvalidResponse("bytes arrived that answer no command")
            return exchange(sock)
        except Exception as error:
            if isinstance(error, TierError):
                raise
            raise tier_error(self.endpoint, error) from error
        finally:
            self.answered = sock.answered
            if not self._settled:
                self.disconnect()

    def _replies(self, count: int) -> list[Reply | TierRefused]:
        """The next replies, parsed by redis-py, TierRefused in the place of an error reply."""
        read = self._parser.read_response
        replies: list[Reply | TierRefused] = []
        while len(replies) < count:
            try:
                reply = read()
            except (RedisError, OSError, TierError):
                raise
            except Exception as error:  # whatever a parser makes of a reply that no server sends
                raise InvalidResponse(f"a reply that cannot be parsed: {type(error).__name__}") from error
            replies.append(refusal(self.endpoint, reply) if isinstance(reply, ResponseError) else reply)
        return replies

    def _expect_value(self, sock: DeadlineSocket, needed: int) -> None:
        """Read the length of a value of ``needed`` bytes. Raises what :meth:`receive_value` raises."""
        length = sock.bulk_length()
        if length is None:
            replies = self._replies(1)
            if replies[0] is not None and not isinstance(replies[0], TierRefused):
                raise InvalidResponse(f"a value was expected, not {type(replies[0]).__name__}")
            self._settled = True
            if isinstance(replies[0], WrongType):
                raise TierCorrupt(CorruptReason.MAGIC, str(replies[0]))
            accepted(replies.pop())
            raise TierMiss
        if length != needed:
            reason = CorruptReason.SHORT if length < needed else CorruptReason.LENGTH
            raise TierCorrupt(reason, f"{self.endpoint}: the value has {length} bytes, a frame has {needed}")


def _fill(
    sock: DeadlineSocket,
    parts: Sequence[Span],
    arrived: Callable[[int, memoryview], None] = lambda offset, stretch: None,
) -> None:
    """Receive until all ``parts`` are full; arrived(offset, stretch): from the start of the first."""
    offset = 0

    def report(stretch: memoryview) -> None:
        nonlocal offset
        arrived(offset, stretch)
        offset += stretch.nbytes

    for part in parts:
        sock.fill(part, report)


def encode_set(key: bytes, value_bytes: int, ttl_ms: int | None, *, only_if_absent: bool = True) -> tuple[bytes, bytes]:
    """Return the bytes around the value of ``SET key value [PX ttl_ms] [NX]``; the value itself is sent uncopied."""
    options = [] if ttl_ms is None else [b"PX", b"%d" % ttl_ms]
    if only_if_absent:
        options.append(b"NX")
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + len(options), len(key), key, value_bytes)
    tail = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(option), option) for option in options)
    return head, tail
