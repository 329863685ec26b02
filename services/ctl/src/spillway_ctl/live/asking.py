"""Asks the addresses of a release over HTTP, its gateway's certificate trusted as it is."""

from __future__ import annotations

import json
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from spillway_ctl.evidence import Exposition
from spillway_engine.chat_answers import event_data

REQUEST_SECONDS = 120.0
READY_SECONDS = 5.0
CONNECT_SECONDS = 5.0
POLL_SECONDS = 1.0


class CheckFailed(Exception):
    """A check failed. The message says what was expected and what was seen."""


@dataclass(frozen=True)
class Asker:
    """Asks with the settings that hold for a whole release.

    Attributes:
        certificate: the gateway's own, whatever names it was made for; None: it speaks plain HTTP.
        poll_seconds: between two looks at what is still to happen.
    """

    certificate: Path | None = None
    poll_seconds: float = field(default=POLL_SECONDS, kw_only=True)

    def ask(
        self, url: str, key: str, body: Mapping[str, Any] | None = None, more: Mapping[str, str] | None = None
    ) -> tuple[dict[str, Any], Mapping[str, str]]:
        """The answer's document and headers; `more` are headers of the request.

        Raises:
            CheckFailed: the answer's status is none of success.
            OSError, ValueError: there was no answer, or it is no JSON.
        """
        headers = {"content-type": "application/json", **bearer(key), **(more or {})}
        try:
            with self._open(
                url, REQUEST_SECONDS, None if body is None else json.dumps(body).encode(), headers
            ) as reply:
                return json.load(reply), reply.headers
        except urllib.error.HTTPError as error:
            raise _refusal(url, error) from error

    def stream(self, url: str, key: str, body: Mapping[str, Any]) -> list[str]:
        """The data of each event. Raises as `ask` does."""
        headers = {"content-type": "application/json", **bearer(key)}
        try:
            with self._open(url, REQUEST_SECONDS, json.dumps(body).encode(), headers) as reply:
                return list(event_data(reply))
        except urllib.error.HTTPError as error:
            raise _refusal(url, error) from error

    def optional(self, url: str, key: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Empty if there is no such route."""
        try:
            return self.ask(url, key, body)[0]
        except (CheckFailed, OSError, ValueError):
            return {}

    def page(self, url: str, key: str = "") -> Exposition | None:
        """/metrics; None if it is not shown."""
        try:
            with self._open(f"{url}/metrics", REQUEST_SECONDS, None, bearer(key)) as reply:
                return Exposition(reply.read().decode())
        except (OSError, ValueError):
            return None

    def is_ready(self, engine: str) -> bool:
        try:
            with self._open(f"{engine}/ready", READY_SECONDS):
                return True
        except OSError:
            return False

    def wait_until_reachable(self, url: str, deadline: float) -> None:
        """Returns once a connection is made, or at the deadline: what is wrong then, the checks say."""
        address = urllib.parse.urlsplit(url)
        port = address.port or {"http": 80, "https": 443}[address.scheme]
        while True:
            try:
                socket.create_connection((address.hostname or "", port), CONNECT_SECONDS).close()
            except OSError:
                if time.monotonic() >= deadline:
                    return
                time.sleep(self.poll_seconds)
            else:
                return

    def _open(
        self,
        url: str,
        timeout_seconds: float,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        # The addresses are the chart's own, http and https alone.
        request = urllib.request.Request(url, data=body, headers=dict(headers or {}))  # noqa: S310
        context = self._trusting if url.startswith("https:") else None
        return urllib.request.urlopen(request, timeout=timeout_seconds, context=context)  # noqa: S310

    @cached_property
    def _trusting(self) -> ssl.SSLContext | None:
        """Takes this certificate, or one that it signed, and no other."""
        if self.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(self.certificate)
        return context


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _refusal(url: str, error: urllib.error.HTTPError) -> CheckFailed:
    return CheckFailed(f"{url} answered {error.code}: {error.read(500).decode(errors='replace')}")
