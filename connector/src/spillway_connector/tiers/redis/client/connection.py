"""Connections of redis-py, and the value path: large values sent from and received into the caller's memory.

redis-py logs in, encodes commands, parses replies and follows the sentinels. It assembles a whole reply before it
returns it, which costs a copy and halves the rate of a 3 MB GET, so values bypass its parser. Addresses are tried as
dial.py says, and deadlines are kept by deadline_socket.py.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from hiredis import pack_command
from redis._parsers import _RESP2Parser
from redis.connection import Connection, SSLConnection
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, ResponseError
from redis.sentinel import SentinelManagedConnection

from spillway_connector.errors import (
    CorruptReason,
    TierCorrupt,
    TierError,
    TierMiss,
    TierRefused,
    TierTimeout,
    TierUnreachable,
    UnreachableReason,
)
from spillway_connector.tiers.redis.client.deadline_socket import DeadlineSocket, connect_deadline
from spillway_connector.tiers.redis.client.dial import dial
from spillway_connector.tiers.redis.client.endpoint import Address, RedisEndpoint, Topology
from spillway_connector.tiers.redis.client.errors import Reply, WrongType, accepted, refusal, tier_error
from spillway_connector.tiers.redis.client.resolve import SYSTEM, SocketAddress
from spillway_connector.tiers.tier import Clock

RESP_VERSION = 2  # the documented users may not send HELLO

_Result = TypeVar("_Result")
_encode = cast("Callable[[tuple[bytes, ...]], bytes]", pack_command)


class _Parser(_RESP2Parser):
    """Returns all error replies; redis-py's raises those that it counts as connection errors, and keeps their bytes.

    Not on hiredis, which allocates as many items as an array claims to have: "*4000000000" takes 23 s.
    """

    EXCEPTION_CLASSES = {  # noqa: RUF012 - as redis-py declares it
        code: kind
        for code, kind in _RESP2Parser.EXCEPTION_CLASSES.items()
        if isinstance(kind, type) and not issubclass(kind, RedisConnectionError)
    }


class RedisConnection(Connection):
    """For one thread at a time. Every command raises TierRefused, TierUnreachable, TierTimeout.

    An error other than TierMiss and an error reply closes the connection, because a reply may be under way; so does
    TierCorrupt, unless the whole reply was read. greeting: a command after the login whose refusal does not matter.
    ``answered``: whether any byte of the reply to the last command came. ``reused``: it was connected before the last
    :meth:`connect`. options: what redis-py's pool adds.
    """

    def __init__(
        self,
        *,
        endpoint: RedisEndpoint,
        clock: Clock,
        greeting: tuple[bytes, ...] = (),
        protocol: int = RESP_VERSION,
        **options: Any,
    ) -> None:
        login = endpoint.password is not None or endpoint.password_file is not None
        super().__init__(
            host=endpoint.host,
            port=endpoint.port,
            db=endpoint.database,
            credential_provider=_Login(endpoint) if login else None,
            protocol=protocol,
            driver_info=None,  # the documented users may not send CLIENT SETINFO
            parser_class=_Parser,
            socket_timeout=None,
            **options,
        )
        self.endpoint = endpoint
        self.answered = False
        self.reused = False
        self._clock = clock
        self._greeting = greeting
        self._dialed: tuple[Address, SocketAddress] | None = None
        self._settled = True  # no reply is under way

    def connect(self) -> None:
        """Connect and log in, within connect_by(). Does nothing where it is connected."""
        self.reused = self.is_connected
        if self.reused:
            return
        self._dialed = None
        try:
            super().connect()
        except Exception as error:
            self.disconnect()
            if self._dialed is not None and not isinstance(error, TierRefused | ResponseError):
                SYSTEM.avoid(*self._dialed)
            if isinstance(error, TierError):
                raise
            raise tier_error(self.endpoint, error) from error
        if self._dialed is not None:
            SYSTEM.prefer(*self._dialed)

    def can_read(self, timeout: float = 0) -> bool:
        """Whether something arrived that was not asked for, or the end of the connection. It does not wait."""
        sock = self._sock
        return sock is not None and (sock.has_something() or bool(self._parser._buffer.unread_bytes()))

    def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in. A server that is loading, wants a login or is silent shows it now, by a PING."""
        super().on_connect_check_health(check_health=False)
        self._send_ping()
        if self._greeting:
            self.send_command(*self._greeting, check_health=False)
            try:
                self.read_response()
            except ResponseError:
                pass

    def interrupt(self) -> None:
        """From another thread: end a wait in progress at once."""
        sock = self._sock
        try:
            if sock is not None:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

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

    def send_value(self, parts: list[bytes | memoryview], deadline: float) -> Reply:
        """Send one command that is encoded already (see :func:`encode_set`) and return its reply."""

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
        self.receive_values([command], [targets], deadline)

    def receive_values(
        self,
        commands: Sequence[tuple[bytes, ...]],
        targets: Sequence[list[memoryview]],
        deadline: float,
        received: Callable[[int], None] = lambda place: None,
        arrived: Callable[[int, int, memoryview], None] = lambda place, offset, stretch: None,
    ) -> None:
        """The same for several values; each is requested once the one before it is known to exist and to fit.

        So the server keeps sending while ``received(place)`` checks a complete value, and of absent values only one is
        ever requested. Where ``received`` raises before the last value, the connection is closed.
        arrived(place, offset, stretch): bytes of a value that are in place now, from ``offset`` within it, in order
        and each once; no stretch spans two of its targets. It runs while the server keeps sending.
        """

        def exchange(sock: DeadlineSocket) -> None:
            sock.send([_encode(commands[0])])
            for place, parts in enumerate(targets):
                self._expect_value(sock, sum(part.nbytes for part in parts))
                if place + 1 < len(commands):
                    sock.send([_encode(commands[place + 1])])
                offset = 0
                for part in parts:
                    for stretch in sock.fill(part):
                        arrived(place, offset, stretch)
                        offset += stretch.nbytes
                end = bytearray(2)
                for _ in sock.fill(memoryview(end)):
                    pass
                if end != b"\r\n":
                    raise InvalidResponse("a value without its end")
                self._settled = place + 1 == len(commands)
                received(place)

        self._exchange(exchange, deadline)

    def _connect(self) -> DeadlineSocket:
        deadline = connect_deadline()
        plain, address = dial(self.endpoint, self._clock, deadline)
        if address is not None:
            self._dialed = Address(self.endpoint.host, self.endpoint.port), address
        return DeadlineSocket(plain, self._clock, deadline)

    def _exchange(self, exchange: Callable[[DeadlineSocket], _Result], deadline: float) -> _Result:
        """Run ``exchange``; where it raises, close the connection unless all replies were read."""
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
            except (ValueError, TypeError, RecursionError, MemoryError) as error:
                raise InvalidResponse(f"a reply that cannot be parsed: {error!r:.100}") from error
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


class _Login(CredentialProvider):
    """Called by redis-py at each login, so a password file is read anew."""

    def __init__(self, endpoint: RedisEndpoint) -> None:
        self._endpoint = endpoint

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._endpoint.current_password() or ""
        return (password,) if self._endpoint.username is None else (self._endpoint.username, password)


class SentinelConnection(RedisConnection, SentinelManagedConnection):
    """To the primary that the pool's sentinels name when it connects."""

    def connect_to(self, address: tuple[str, int]) -> None:
        self.endpoint = self.endpoint.at(Address(*address))
        super().connect_to(address)


class _Encrypted(SSLConnection):
    def __init__(self, *, endpoint: RedisEndpoint, **options: Any) -> None:
        super().__init__(
            endpoint=endpoint,
            ssl_ca_certs=endpoint.tls_ca_file,
            ssl_certfile=endpoint.tls_certificate_file,
            ssl_keyfile=endpoint.tls_key_file,
            **options,
        )
        self.endpoint = endpoint

    def _wrap_socket_with_ssl(self, sock: DeadlineSocket) -> DeadlineSocket:
        """redis-py would trust the system's authorities beside those of the given file."""
        try:
            # Files are read for every connection, so that renewed certificates need no restart.
            context = ssl.create_default_context(cafile=self.ca_certs)
            if self.certfile is not None:
                context.load_cert_chain(self.certfile, self.keyfile)
            sock.encrypt(context, self.host)
            return sock
        except TimeoutError as error:
            raise TierTimeout(f"{self.endpoint}: no connection before the deadline") from error
        except OSError as error:  # a file of ours, the peer's answer, or a peer that speaks no TLS
            sock.close()
            cause = f"TLS: {error}"
            if isinstance(error, ssl.SSLCertVerificationError):
                authorities = self.ca_certs or "those of the system"
                cause = (
                    f"the server's certificate is not accepted: {error.verify_message}; "
                    f"authorities: {authorities} (tlsCaFile)"
                )
            raise TierUnreachable(UnreachableReason.TLS, f"{self.endpoint}: {cause}") from error


class EncryptedConnection(_Encrypted, RedisConnection):
    """The same with TLS."""


class EncryptedSentinelConnection(_Encrypted, SentinelConnection):
    """The same with TLS."""


def connection_class(endpoint: RedisEndpoint) -> type[RedisConnection]:
    """What connects to ``endpoint``."""
    if endpoint.topology is Topology.SENTINEL:
        return EncryptedSentinelConnection if endpoint.tls else SentinelConnection
    return EncryptedConnection if endpoint.tls else RedisConnection


def encode_set(key: bytes, value_bytes: int, ttl_ms: int | None, *, only_if_absent: bool = True) -> tuple[bytes, bytes]:
    """What surrounds the value of ``SET key value [PX ttl_ms] [NX]``; the value itself is sent from where it is."""
    options = [] if ttl_ms is None else [b"PX", b"%d" % ttl_ms]
    if only_if_absent:
        options.append(b"NX")
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + len(options), len(key), key, value_bytes)
    tail = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(option), option) for option in options)
    return head, tail
