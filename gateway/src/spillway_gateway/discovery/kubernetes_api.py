"""The two calls that discovery makes to a Kubernetes API server: list, and watch.

Protocol: Kubernetes API concepts, "Efficient detection of changes". A watch is a reply without end, one JSON document
per line. Every fault becomes a SourceFailed with its reason; nothing of a token goes into a message.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec

from spillway_gateway.config.discovery import KubernetesDiscovery
from spillway_gateway.discovery.endpoint_slices import SERVICE_LABEL, EndpointSlice, EndpointSliceList, Metadata
from spillway_gateway.discovery.found import SourceFailed

PAGE_ITEMS = 500
LIST_BYTES_MAX = 64 * 1024 * 1024
LINE_BYTES_MAX = 8 * 1024 * 1024  # an object is at most 1.5 MiB in etcd
PAGES_MAX = 1_000
# A peer that went away without a word shows after 10 + 3 * 5 seconds, not at the end of the watch.
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))

EventType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]


class Gone(SourceFailed):
    """The server no longer knows what happened since the given version: list again."""

    def __init__(self) -> None:
        super().__init__("expired", "the resource version is too old, and everything has to be listed again")


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """piece: None for a bookmark. version: where a later watch may begin."""

    type: EventType
    version: str
    piece: EndpointSlice | None


class _RawEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Bookmark(msgspec.Struct):
    metadata: Metadata


class _ApiStatus(msgspec.Struct):
    code: int = 0
    reason: str = ""
    message: str = ""


_events = msgspec.json.Decoder(_RawEvent)
_slices = msgspec.json.Decoder(EndpointSlice)
_bookmarks = msgspec.json.Decoder(_Bookmark)
_lists = msgspec.json.Decoder(EndpointSliceList)
_statuses = msgspec.json.Decoder(_ApiStatus)


class KubernetesApi:
    """For one Service. session: closed by whoever opened it."""

    def __init__(self, config: KubernetesDiscovery, session: aiohttp.ClientSession) -> None:
        self._config = config
        self._session = session
        self._ca: tuple[tuple[int, int, int], ssl.SSLContext] | None = None

    async def list(self) -> tuple[dict[str, EndpointSlice], str]:
        """All slices by name, and the version that they are of. Raises SourceFailed."""
        found: dict[str, EndpointSlice] = {}
        parameters = {"limit": str(PAGE_ITEMS)}
        try:
            async with asyncio.timeout(self._config.timeout_seconds):
                for _ in range(PAGES_MAX):
                    page = await self._page(parameters)
                    found.update({piece.metadata.name: piece for piece in page.items or ()})
                    if not page.metadata.continue_token:
                        return found, page.metadata.resource_version
                    parameters["continue"] = page.metadata.continue_token
        except TimeoutError as error:
            raise SourceFailed("timeout", f"no list within {self._config.timeout_seconds:g} s") from error
        raise SourceFailed("invalid", f"a list of more than {PAGES_MAX} pages")

    @asynccontextmanager
    async def watch(self, version: str, seconds: int) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        """Changes after `version`, until the server ends the watch, which it is asked to do after `seconds`.

        Entered when the server has agreed. Raises Gone or another SourceFailed, then and while events are read, also
        when nothing ends the watch in time.
        """
        parameters = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        patience = self._config.timeout_seconds
        try:
            async with asyncio.timeout(patience):
                reply = await self._get(parameters, seconds + patience)
        except TimeoutError as error:
            raise SourceFailed("timeout", f"a watch was not answered within {patience:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(error) from error
        try:
            await _check(reply, patience)
            _keep_alive(reply)
            yield _events_of(reply)
        finally:
            reply.close()

    async def _page(self, parameters: dict[str, str]) -> EndpointSliceList:
        try:
            async with await self._get(parameters, self._config.timeout_seconds) as reply:
                await _check(reply, self._config.timeout_seconds)
                parts, size = [], 0
                async for part in reply.content.iter_any():
                    size += len(part)
                    if size > LIST_BYTES_MAX:
                        raise SourceFailed("invalid", f"a list of more than {LIST_BYTES_MAX} bytes")
                    parts.append(part)
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(error) from error
        try:
            return _lists.decode(b"".join(parts))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SourceFailed("invalid", f"the list is no EndpointSliceList: {error}") from error

    async def _get(self, parameters: dict[str, str], total_seconds: float) -> aiohttp.ClientResponse:
        config = self._config
        server = config.api_server or in_cluster_server(os.environ)
        headers = {"accept": "application/json"}
        secure: ssl.SSLContext | bool = True
        if server.startswith("https:"):  # a token is never sent in clear; kubectl proxy, on plain HTTP, needs none
            token = await asyncio.to_thread(_file, config.token_file, "tokenFile")
            headers["authorization"] = f"Bearer {token}"
            secure = await asyncio.to_thread(self._ssl)
        namespace = config.namespace or await asyncio.to_thread(_file, config.namespace_file, "namespace")
        url = f"{server.rstrip('/')}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        return await self._session.get(
            url,
            params={"labelSelector": f"{SERVICE_LABEL}={config.service}", **parameters},
            headers=headers,
            ssl=secure,
            timeout=aiohttp.ClientTimeout(total=total_seconds),
            allow_redirects=False,
        )

    def _ssl(self) -> ssl.SSLContext:
        """The cluster's own authority, read again when its file changes."""
        path = self._config.ca_file
        try:
            status = Path(path).stat()
            state = (status.st_ino, status.st_mtime_ns, status.st_size)
            if self._ca is None or self._ca[0] != state:
                self._ca = (state, ssl.create_default_context(cafile=path))
        except OSError as error:  # ssl.SSLError is one too
            raise SourceFailed("credentials", f"caFile {path}: cannot be used ({error.strerror or error})") from error
        return self._ca[1]


def in_cluster_server(environment: Mapping[str, str]) -> str:
    """The API server as every container of a cluster is told. Pure."""
    host = environment.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _file(path: str, setting: str) -> str:
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text"
        raise SourceFailed(
            "credentials", f"{path} cannot be read ({why}); mount the service account's token, or set {setting}"
        ) from error
    if not text or not text.isprintable():
        raise SourceFailed("credentials", f"{path}: one line of text needed")
    return text


async def _events_of(reply: aiohttp.ClientResponse) -> AsyncIterator[WatchEvent]:
    rest = b""
    try:
        async for part in reply.content.iter_any():
            *lines, rest = (rest + part).split(b"\n")
            if len(rest) > LINE_BYTES_MAX:
                raise SourceFailed("invalid", f"a watch event of more than {LINE_BYTES_MAX} bytes")
            for line in lines:
                if line.strip():
                    yield _event(line)
    except TimeoutError as error:
        raise SourceFailed("timeout", "a watch did not end in time") from error
    except (aiohttp.ClientError, OSError) as error:
        raise _unreachable(error) from error


async def _check(reply: aiohttp.ClientResponse, patience_seconds: float) -> None:
    if reply.status == 200:
        return
    try:
        async with asyncio.timeout(patience_seconds):
            body = await reply.content.read(64 * 1024)
    except (aiohttp.ClientError, OSError):
        body = b""
    try:
        told = _statuses.decode(body).message[:300]
    except (msgspec.DecodeError, UnicodeDecodeError):
        told = ""
    if reply.status == 410:
        raise Gone
    reasons = {401: "unauthorized", 403: "forbidden"}
    remedy = {
        401: "; the token is not valid (any more)",
        403: "; allow get, list and watch of endpointslices.discovery.k8s.io in a Role",
    }
    said = f": {told}" if told else ""
    raise SourceFailed(
        reasons.get(reply.status, "refused"),
        f"the API server answers {reply.status}{said}{remedy.get(reply.status, '')}",
    )


def _event(line: bytes) -> WatchEvent:
    try:
        raw = _events.decode(line)
        if raw.type == "ERROR":
            status = _statuses.decode(raw.object)
            if status.code == 410:
                raise Gone
            raise SourceFailed("refused", f"the watch ended with {status.code} {status.reason}: {status.message[:300]}")
        if raw.type == "BOOKMARK":
            return WatchEvent("BOOKMARK", _bookmarks.decode(raw.object).metadata.resource_version, None)
        if raw.type in ("ADDED", "MODIFIED", "DELETED"):
            piece = _slices.decode(raw.object)
            return WatchEvent(raw.type, piece.metadata.resource_version, piece)  # type: ignore[arg-type]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SourceFailed("invalid", f"a watch event cannot be read: {error}") from error
    raise SourceFailed("invalid", f"a watch event of unknown type {raw.type[:40]!r}")


def _keep_alive(reply: aiohttp.ClientResponse) -> None:
    connection = reply.connection
    transport = connection.transport if connection is not None else None
    raw = transport.get_extra_info("socket") if transport is not None else None
    if raw is None:
        return
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        option = getattr(socket, name, None)  # not on every platform
        if option is not None:
            raw.setsockopt(socket.IPPROTO_TCP, option, value)


def _unreachable(error: Exception) -> SourceFailed:
    return SourceFailed("unreachable", f"the API server cannot be reached ({error or error.__class__.__name__})")
