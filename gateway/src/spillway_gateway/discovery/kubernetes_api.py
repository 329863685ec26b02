"""List and watch of one Service's EndpointSlices, InferenceObjectives, and annotations of pods, through the official
client package.

Protocol: Kubernetes API concepts, "Efficient detection of changes". The package is heavy (about 20 MB of memory, a
third of a second of CPU time), so only the thread of a configured Kubernetes discovery imports this module. Every fault
becomes a SourceFailed with its reason. No message contains a token.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import urllib3
from kubernetes.client import ApiClient, ApiException, Configuration, CoreV1Api, CustomObjectsApi, DiscoveryV1Api
from kubernetes.utils.keepalive import tcp_keepalive_socket_options
from kubernetes.watch import Watch

from spillway_gateway.config.discovery import KubernetesDiscovery
from spillway_gateway.discovery.endpoint_slices import (
    SERVICE_LABEL,
    EndpointSlice,
    EndpointSliceList,
    Metadata,
    WatchEvent,
)
from spillway_gateway.discovery.found import SourceFailed

PAGE_ITEMS = 500
PAGES_MAX = 1_000
LIST_BYTES_MAX = 64 * 1024 * 1024  # of one page
READ_BYTES = 64 * 1024


class _Bookmark(msgspec.Struct):
    metadata: Metadata


class _ObjectiveSpec(msgspec.Struct):
    priority: int | None = None


class _Objective(msgspec.Struct):
    metadata: Metadata
    spec: _ObjectiveSpec = msgspec.field(default_factory=_ObjectiveSpec)


class _ObjectiveList(msgspec.Struct):
    items: list[_Objective] | None = None


class _ApiStatus(msgspec.Struct):
    message: str = ""


_lists = msgspec.json.Decoder(EndpointSliceList)
_objectives = msgspec.json.Decoder(_ObjectiveList)
_statuses = msgspec.json.Decoder(_ApiStatus)


class KubernetesApi:
    """Lists and watches the EndpointSlices of one Service.

    list() and watch() block and belong to one thread; any thread may call stop(). Token, authority and address are read
    for each list and each watch, so a token is used at most for one watch.
    """

    def __init__(self, config: KubernetesDiscovery) -> None:
        self._config = config
        self._lock = threading.Lock()  # guards the two below
        self._stopped = False
        self._socket: socket.socket | None = None  # of the watch in progress

    def stop(self) -> None:
        """End the watch in progress now; list() and watch() raise SourceFailed from here on."""
        with self._lock:
            self._stopped = True
            if self._socket is not None:
                _shut_down(self._socket)

    def list(self) -> tuple[dict[str, EndpointSlice], str]:
        """All slices by name, and the version that they are of. Raises SourceFailed."""
        found: dict[str, EndpointSlice] = {}
        deadline = time.monotonic() + self._config.timeout_seconds
        continue_token = None
        with self._requests() as request:
            for _ in range(PAGES_MAX):
                page = self._page(request, continue_token, deadline)
                found.update({piece.metadata.name: piece for piece in page.items or ()})
                continue_token = page.metadata.continue_token
                if not continue_token:
                    return found, page.metadata.resource_version
        raise SourceFailed("invalid", f"a list of more than {PAGES_MAX} pages")

    def watch(self, version: str, seconds: int, begun: Callable[[], None]) -> Iterator[WatchEvent]:
        """Changes after `version`, until the server ends the watch, which it is asked to do after `seconds`.

        begun: called once the server has accepted. Raises SourceFailed: expired when the server no longer has the
        history since `version`, timeout also when nothing ends the watch in time.
        """
        quiet_seconds_max = seconds + self._config.timeout_seconds
        deadline = time.monotonic() + quiet_seconds_max
        with self._requests() as request:
            reply = request(watch=True, resource_version=version, timeout_seconds=seconds, allow_watch_bookmarks=True)
            try:
                self._register(reply, quiet_seconds_max)
                begun()
                # A function without a return annotation: Watch builds no model objects of the events.
                events = Watch().stream(lambda **_: reply, timeout_seconds=seconds)  # type: ignore[no-untyped-call]
                for event in events:
                    yield _watch_event(event)
                    if time.monotonic() > deadline:
                        raise SourceFailed("timeout", "a watch did not end in time")
            except (KeyError, TypeError) as error:  # from Watch, which expects every field of an event
                raise SourceFailed("invalid", f"a watch event cannot be read: {error!r}") from error
            finally:
                with self._lock:
                    self._socket = None
                reply.close()

    def _page(self, request: Callable[..., Any], continue_token: str | None, deadline: float) -> EndpointSliceList:
        parameters = {"_continue": continue_token} if continue_token else {}
        body = _read_list(request(limit=PAGE_ITEMS, **parameters), self._config, deadline)
        try:
            return _lists.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SourceFailed("invalid", f"the list is no EndpointSliceList: {error}") from error

    @contextmanager
    def _requests(self) -> Iterator[Callable[..., Any]]:
        """A function that lists with further parameters and returns the unread reply. Maps the package's errors."""
        config = self._config
        with _client(config, "get, list and watch of endpointslices.discovery.k8s.io") as (client, namespace):
            api = DiscoveryV1Api(client)

            def request(**parameters: Any) -> Any:
                with self._lock:
                    if self._stopped:
                        raise SourceFailed("stopped", "discovery ends")
                return api.list_namespaced_endpoint_slice(
                    namespace,
                    label_selector=service_selector(config),
                    _preload_content=False,
                    _request_timeout=(config.timeout_seconds, config.timeout_seconds),
                    **parameters,
                )

            yield request

    def _register(self, reply: Any, read_seconds: float) -> None:
        """Make the watch's socket known to stop(). Up to here a read had timeout_seconds; a watch may be quiet."""
        connection = reply.connection
        opened = connection.sock if connection is not None else None
        with self._lock:
            self._socket = opened
            if opened is not None:
                opened.settimeout(read_seconds)
                if self._stopped:
                    _shut_down(opened)


def service_selector(config: KubernetesDiscovery) -> str:
    """The selector of the slices of all Services of the model."""
    if not config.role_services:
        return f"{SERVICE_LABEL}={config.service}"
    return f"{SERVICE_LABEL} in ({','.join([config.service, *config.role_services])})"


def annotate_pod(config: KubernetesDiscovery, pod: str, annotations: Mapping[str, str]) -> bool:
    """Write annotations of a pod; blocks. False: there is no such pod. Raises SourceFailed."""
    with _client(config, "patch of pods") as (client, namespace):
        try:
            reply: Any = CoreV1Api(client).patch_namespaced_pod(
                pod,
                namespace,
                {"metadata": {"annotations": dict(annotations)}},
                _preload_content=False,
                _request_timeout=(config.timeout_seconds, config.timeout_seconds),
            )
        except ApiException as error:
            if error.status == 404:
                return False
            raise
        reply.close()
    return True


def list_objectives(config: KubernetesDiscovery) -> dict[str, int]:
    """The priorities of the namespace's InferenceObjectives, by their name; blocks.

    Source: API reference of the Gateway API Inference Extension, InferenceObjective v1alpha2; without a priority it is
    0. Empty in a cluster that does not know the kind. Raises SourceFailed.
    """
    deadline = time.monotonic() + config.timeout_seconds
    with _client(config, "list of inferenceobjectives.inference.networking.x-k8s.io") as (client, namespace):
        try:
            reply: Any = CustomObjectsApi(client).list_namespaced_custom_object(
                "inference.networking.x-k8s.io",
                "v1alpha2",
                namespace,
                "inferenceobjectives",
                _preload_content=False,
                _request_timeout=(config.timeout_seconds, config.timeout_seconds),
            )
        except ApiException as error:
            if error.status == 404:
                return {}
            raise
        body = _read_list(reply, config, deadline)
    try:
        items = _objectives.decode(body).items or []
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SourceFailed("invalid", f"the list is no InferenceObjectiveList: {error}") from error
    return {each.metadata.name: each.spec.priority or 0 for each in items}


def _read_list(reply: Any, config: KubernetesDiscovery, deadline: float) -> bytes:
    """The reply's bytes, within the bounds of a list. Raises SourceFailed."""
    parts, size = [], 0
    with closing(reply):
        for part in reply.stream(READ_BYTES):
            parts.append(part)
            size += len(part)
            if size > LIST_BYTES_MAX:
                raise SourceFailed("invalid", f"a list of more than {LIST_BYTES_MAX} bytes")
            if time.monotonic() > deadline:
                raise SourceFailed("timeout", f"no list within {config.timeout_seconds:g} s")
    return b"".join(parts)


@contextmanager
def _client(config: KubernetesDiscovery, permissions: str) -> Iterator[tuple[ApiClient, str]]:
    """A client, and the namespace of the engines. permissions: what a Role has to allow. Maps the package's errors."""
    try:
        namespace = config.namespace or _line_of(config.namespace_file, "namespace")
        with ApiClient(_configuration(config)) as client:
            yield client, namespace
    except ApiException as error:
        raise _refused(error, permissions) from error
    except urllib3.exceptions.NewConnectionError as error:  # a TimeoutError by inheritance alone
        raise _unreachable(str(error)) from error
    except urllib3.exceptions.TimeoutError as error:
        raise SourceFailed("timeout", f"no answer within {config.timeout_seconds:g} s") from error
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise _unreachable(str(error) or error.__class__.__name__) from error


def in_cluster_server(environment: Mapping[str, str]) -> str:
    """The address of the API server from a container's environment. Pure."""
    host = environment.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _configuration(config: KubernetesDiscovery) -> Configuration:
    """The configuration of one client. Raises SourceFailed if a mounted file is of no use."""
    server = (config.api_server or in_cluster_server(os.environ)).rstrip("/")
    found = Configuration(host=server, no_proxy="*")  # the API server is reached directly, whatever the environment
    found.retries = False  # the caller decides when to try again
    # A peer that vanished is noticed after 10 + 3 * 5 seconds, not at the end of the watch.
    found.socket_options = tcp_keepalive_socket_options(idle=10, interval=5, count=3)
    if server.startswith("https:"):  # a token is never sent in clear; kubectl proxy, on plain HTTP, needs none
        try:
            ssl.create_default_context(cafile=config.ca_file)
        except OSError as error:  # ssl.SSLError is one too
            why = error.strerror or error
            raise SourceFailed("credentials", f"caFile {config.ca_file}: cannot be used ({why})") from error
        found.ssl_ca_cert = config.ca_file
        found.api_key = {"BearerToken": f"Bearer {_line_of(config.token_file, 'tokenFile')}"}
    return found


def _line_of(path: str, setting: str) -> str:
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


def _watch_event(event: Any) -> WatchEvent:
    """Return the document of a line that Watch yields; None for a line that is no JSON."""
    if not isinstance(event, dict):
        raise SourceFailed("invalid", "a watch event is not JSON")
    kind, document = event.get("type"), event.get("raw_object")
    try:
        if kind == "BOOKMARK":
            return WatchEvent("BOOKMARK", msgspec.convert(document, _Bookmark).metadata.resource_version, None)
        if kind in ("ADDED", "MODIFIED", "DELETED"):
            piece = msgspec.convert(document, EndpointSlice)
            return WatchEvent(kind, piece.metadata.resource_version, piece)
    except msgspec.ValidationError as error:
        raise SourceFailed("invalid", f"a watch event cannot be read: {error}") from error
    raise SourceFailed("invalid", f"a watch event of unknown type {str(kind)[:40]!r}")


def _refused(error: ApiException, permissions: str) -> SourceFailed:
    status = error.status or 0
    if status == 410:
        return SourceFailed("expired", "the resource version is too old; everything is listed again")
    if not status:  # the package's form of a failed TLS handshake
        return _unreachable(" ".join(str(error.reason).split()))
    try:
        message = _statuses.decode(error.body or b"{}").message
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = ""
    detail = f": {message[:300]}" if message else ""
    remedies = {401: "; the token is not valid (any more)", 403: f"; allow {permissions} in a Role"}
    return SourceFailed(
        {401: "unauthorized", 403: "forbidden"}.get(status, "refused"),
        f"the API server answers {status}{detail}{remedies.get(status, '')}",
    )


def _unreachable(why: str) -> SourceFailed:
    return SourceFailed("unreachable", f"the API server cannot be reached ({why})")


def _shut_down(opened: socket.socket) -> None:
    """Wakes the thread that reads from it; closing alone would not."""
    with suppress(OSError):  # the peer closed it first
        opened.shutdown(socket.SHUT_RDWR)
