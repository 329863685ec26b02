"""Where a Redis or Valkey server is and how to log in: one value, parsed once."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

from spillway_connector.errors import ConfigError

_FORMS = "redis://HOST:PORT/DB, rediss://HOST:PORT/DB (TLS) or unix:///PATH?db=DB"


@dataclass(frozen=True, slots=True)
class RedisEndpoint:
    """``unix_path`` is set for a local socket, ``host`` and ``port`` otherwise. ``password`` never shows in a repr."""

    host: str = "127.0.0.1"
    port: int = 6379
    unix_path: str | None = None
    database: int = 0
    tls: bool = False
    tls_ca_file: str | None = None  # None: the system's authorities
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        username: str | None = None,
        password: str | None = None,
        tls_ca_file: str | None = None,
    ) -> RedisEndpoint:
        """Parse ``url``. Raises ConfigError; a password inside the URL is refused because URLs end up in logs."""
        parts = urlsplit(url)
        if parts.username is not None or parts.password is not None:
            raise ConfigError(
                "redis.url: must not carry a user or password; name variables in usernameEnv, passwordEnv"
            )
        if parts.scheme == "unix":
            if not parts.path or parts.netloc:
                raise ConfigError(f"redis.url: {url!r} names no socket; use {_FORMS}")
            database = parse_qs(parts.query).get("db", ["0"])[-1]
            return cls(
                unix_path=unquote(parts.path),
                database=_database(url, database),
                username=username,
                password=password,
            )
        try:
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"redis.url: {url!r}: {error}; use {_FORMS}") from error
        if parts.scheme not in ("redis", "rediss") or not host or parts.query or parts.fragment:
            raise ConfigError(f"redis.url: {url!r} is not understood; use {_FORMS}")
        return cls(
            host=host,
            port=port or 6379,
            database=_database(url, parts.path.strip("/") or "0"),
            tls=parts.scheme == "rediss",
            tls_ca_file=tls_ca_file,
            username=username,
            password=password,
        )

    def __str__(self) -> str:
        if self.unix_path is not None:
            return f"unix://{self.unix_path}?db={self.database}"
        return f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.port}/{self.database}"


def _database(url: str, text: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"redis.url: {url!r}: the database {text!r} is not a number; use {_FORMS}")
    return int(text)
