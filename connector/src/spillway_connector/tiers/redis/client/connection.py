"""redis-py's connections: plain, with TLS, or to the primary behind sentinels.

redis-py logs in and follows the sentinels. Addresses are tried as dial.py says, deadlines kept by deadline_socket.py.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any

from redis._parsers import _RESP2Parser
from redis.connection import SSLConnection
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, ResponseError
from redis.sentinel import SentinelManagedConnection

from spillway_connector.errors import TierError, TierRefused, TierTimeout, TierUnreachable, UnreachableReason
from spillway_connector.tiers.redis.client.deadline_socket import DeadlineSocket, connect_deadline
from spillway_connector.tiers.redis.client.dial import dial
from spillway_connector.tiers.redis.client.endpoint import Address, RedisEndpoint, Topology
from spillway_connector.tiers.redis.client.errors import tier_error
from spillway_connector.tiers.redis.client.resolve import SYSTEM, SocketAddress
from spillway_connector.tiers.redis.client.value_path import ValueConnection
from spillway_connector.tiers.tier import Clock

RESP_VERSION = 2  # the documented users may not send HELLO
NESTED_MAX = 8  # no reply to a command that is sent here is nested deeper than CLUSTER SLOTS, 4
_ALERT = "\\x15\\x03"  # how a message shows the first bytes of a TLS alert


_NO_TLS = "if the server speaks no TLS here, the URL begins with redis://"
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_MESSAGE")


class _Parser(_RESP2Parser):
    """Returns all error replies; redis-py's raises those that it counts as connection errors, and keeps their bytes.
    Bounds how deep a reply is nested.

    Not on hiredis, which allocates as many items as an array claims to have: "*4000000000" takes 23 s.
    """

    EXCEPTION_CLASSES = {  # noqa: RUF012 - as redis-py declares it
        code: kind
        for code, kind in _RESP2Parser.EXCEPTION_CLASSES.items()
        if isinstance(kind, type) and not issubclass(kind, RedisConnectionError)
    }
    _depth = 0

    def _read_response(self, *args: Any, **options: Any) -> Any:
        if self._depth >= NESTED_MAX:
            raise InvalidResponse(f"a reply nested deeper than {NESTED_MAX}")
        self._depth += 1
        try:
            return super()._read_response(*args, **options)
        finally:
            self._depth -= 1


class RedisConnection(ValueConnection):
    """See ValueConnection. greeting: a command after the login whose refusal does not matter.

    ``reused``: it was connected before the last :meth:`connect`. options: what redis-py's pool adds.
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
            endpoint=endpoint,
            credential_provider=_Login(endpoint) if login else None,
            protocol=protocol,
            driver_info=None,  # the documented users may not send CLIENT SETINFO
            parser_class=_Parser,
            socket_timeout=None,
            **options,
        )
        self.reused = False
        self._clock = clock
        self._greeting = greeting
        self._dialed: tuple[Address, SocketAddress] | None = None

    def connect(self) -> None:
        """Connect and log in, within connect_by(). Does nothing if it is connected."""
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
            failure = tier_error(self.endpoint, error)
            if not self.endpoint.tls and (_ALERT in str(failure) or failure.reason == UnreachableReason.DISCONNECTED):
                failure.args = (f"{failure}; if the server speaks TLS here, the URL begins with rediss://",)
            raise failure from error
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
        """End a wait in progress at once. Called by another thread."""
        sock = self._sock
        try:
            if sock is not None:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def _connect(self) -> DeadlineSocket:
        deadline = connect_deadline()
        plain, address = dial(self.endpoint, self._clock, deadline)
        if address is not None:
            self._dialed = Address(self.endpoint.host, self.endpoint.port), address
        return DeadlineSocket(plain, self._clock, deadline)


class _Login(CredentialProvider):
    """Credentials for redis-py, which asks at each login, so a password file is read again."""

    def __init__(self, endpoint: RedisEndpoint) -> None:
        self._endpoint = endpoint

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._endpoint.current_password() or ""
        return (password,) if self._endpoint.username is None else (self._endpoint.username, password)


class SentinelConnection(RedisConnection, SentinelManagedConnection):
    """A connection to the primary that the pool's sentinels name when it connects."""

    def connect_to(self, address: tuple[str, int]) -> None:
        self.endpoint = self.endpoint.at(Address(*address))
        super().connect_to(address)


class _Encrypted(SSLConnection):
    endpoint: RedisEndpoint

    def __init__(self, *, endpoint: RedisEndpoint, **options: Any) -> None:
        super().__init__(
            endpoint=endpoint,
            ssl_ca_certs=endpoint.tls_ca_file,
            ssl_certfile=endpoint.tls_certificate_file,
            ssl_keyfile=endpoint.tls_key_file,
            **options,
        )

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
            raise TierTimeout(
                f"{self.endpoint}: the server did not answer the TLS handshake before the deadline; {_NO_TLS}"
            ) from error
        except OSError as error:  # a file of ours, the peer's answer, or a peer that speaks no TLS
            sock.close()
            cause = f"TLS: {error}"
            if isinstance(error, ConnectionError | ssl.SSLEOFError) or getattr(error, "reason", "") in _NOT_TLS:
                cause += f"; {_NO_TLS}"
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
    """Return the class of connections to ``endpoint``."""
    if endpoint.topology is Topology.SENTINEL:
        return EncryptedSentinelConnection if endpoint.tls else SentinelConnection
    return EncryptedConnection if endpoint.tls else RedisConnection
