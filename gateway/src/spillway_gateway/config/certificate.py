"""A listener's certificate, reloaded when its files change. Open connections keep the one they began with."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from spillway_gateway.background import on_daemon_thread
from spillway_gateway.config.settings import TlsConfig
from spillway_gateway.errors import ConfigError

logger = logging.getLogger(__name__)


class Certificate:
    """context: the listener's TLS context; handshakes use the certificate loaded last. Raises ConfigError for unusable
    files.

    Args:
        config: the files.
        protocol: the protocol that clients speak over TLS, by ALPN's name.
    """

    def __init__(self, config: TlsConfig, protocol: str = "http/1.1") -> None:
        self._config = config
        self._protocol = protocol
        self._seen = self._state()
        self.context = self._load(self._new_context())
        self.reloads_total = 0

    async def follow(self) -> None:
        """Reload the certificate when its files change, until cancelled."""
        while True:
            await asyncio.sleep(self._config.reload_seconds)
            await on_daemon_thread(self.reload)

    def reload(self) -> None:
        """Load the files if they changed. Blocks. A pair that does not match (one file is newer) is tried again."""
        state = self._state()
        if state == self._seen:
            return
        try:
            self._load(self._new_context())  # a throw-away context: a failed load may set half a pair
        except ConfigError as error:
            logger.error("%s; the certificate loaded before stays in use", error)
            return
        self._load(self.context)
        self._seen = state
        self.reloads_total += 1
        logger.info("listen.tls.certFile %s: read again", self._config.cert_file)

    def _new_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([self._protocol])
        return context

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        config = self._config
        try:
            context.load_cert_chain(config.cert_file, config.key_file, password=_no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(
                f"listen.tls: {config.cert_file} and {config.key_file} cannot be used ({error}); give a PEM chain and "
                "its key without a password"
            ) from error
        return context

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(file_state(Path(path)) for path in (self._config.cert_file, self._config.key_file))


def _no_password() -> str:
    raise ValueError("the key has a password")


def file_state(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes if the file is written or replaced; None without a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
