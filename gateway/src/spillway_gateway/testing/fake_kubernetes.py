"""The part of a Kubernetes API server that the gateway speaks to: EndpointSlices of one namespace, listed and watched,
its InferenceObjectives, and annotations of its pods.

Real HTTP, optionally TLS, with versions, a bounded history, bookmarks, pages and bearer tokens; faults by name.
"""

from __future__ import annotations

import asyncio
import copy
import json
import ssl
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from spillway_gateway.discovery.endpoint_slices import SERVICE_LABEL

_PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
_OBJECTIVES_PATH = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{namespace}/inferenceobjectives"
_POD_PATH = "/api/v1/namespaces/{namespace}/pods/{pod}"
Slice = dict[str, Any]


def pod_endpoint(
    name: str,
    address: str,
    *,
    uid: str | None = None,
    ready: bool | None = True,
    serving: bool | None = None,
    terminating: bool | None = None,
) -> dict[str, Any]:
    """One endpoint of a slice. None: the condition is left out, as old control planes do."""
    conditions = {"ready": ready, "serving": serving, "terminating": terminating}
    return {
        "addresses": [address],
        "conditions": {key: value for key, value in conditions.items() if value is not None},
        "targetRef": {"kind": "Pod", "name": name, "uid": uid or f"uid-of-{name}"},
        "nodeName": "node-0",
    }


def endpoint_slice(
    name: str, endpoints: list[dict[str, Any]], ports: dict[str, int], *, service: str = "engines", family: str = "IPv4"
) -> Slice:
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {"name": name, "labels": {SERVICE_LABEL: service}},
        "addressType": family,
        "endpoints": endpoints,
        "ports": [{"name": key, "port": number, "protocol": "TCP"} for key, number in ports.items()],
    }


@dataclass(eq=False)
class _Watch:
    services: frozenset[str]
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)  # None: ends
    transport: asyncio.BaseTransport | None = None


class FakeKubernetes:
    """Serves from start() to stop(); start() again serves the same objects at the same port.

    tokens: those accepted; empty accepts every request. page_items: of one list page, whatever limit asks for.
    """

    def __init__(self, namespace: str = "spillway", *, tokens: set[str] | None = None, page_items: int = 500) -> None:
        self.namespace = namespace
        self.tokens = tokens or set()
        self.page_items = page_items
        self.port = 0
        self.hangs = False  # requests are accepted and not answered
        self.pending = 0  # of those
        self.status: int | None = None  # every request is answered with it
        self.redirects_to: str | None = None  # every request is answered with 307 and this location
        self.lists = 0
        self.watch_versions: list[int] = []  # where each watch began
        self.refused = 0  # requests with a wrong token
        self.expired = 0  # watches answered with 410
        self.watches: set[_Watch] = set()
        self.annotations: dict[str, dict[str, str]] = {}  # by pod; others do not exist
        self.objectives: dict[str, int | None] | None = None  # priorities by name; None: the kind is not known
        self.may_patch = True
        self.patches = 0
        self._slices: dict[str, Slice] = {}
        self._version = 100
        self._dropped = 100  # events up to this version cannot be watched any more
        self._history: list[tuple[int, str, Slice]] = []
        self._runner: web.AppRunner | None = None
        self._scheme = "http"

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    async def start(self, context: ssl.SSLContext | None = None) -> None:
        app = web.Application()
        app.router.add_get(_PATH, self._serve)
        app.router.add_get(_OBJECTIVES_PATH, self._serve)
        app.router.add_patch(_POD_PATH, self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=context)
        await site.start()
        self._scheme = "https" if context is not None else "http"
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop like a killed server: connections break, and the port refuses."""
        runner, self._runner = self._runner, None
        self.break_watches()
        if runner is not None:
            await runner.cleanup()

    # -- the objects -------------------------------------------------------------------------------------------------

    def put(self, piece: Slice) -> None:
        known = piece["metadata"]["name"] in self._slices
        self._changed("MODIFIED" if known else "ADDED", piece)

    def delete(self, name: str) -> None:
        self._changed("DELETED", self._slices[name])

    def _changed(self, kind: str, piece: Slice) -> None:
        self._version += 1
        stored = copy.deepcopy(piece)
        stored["metadata"]["resourceVersion"] = str(self._version)
        name = stored["metadata"]["name"]
        if kind == "DELETED":
            del self._slices[name]
        else:
            self._slices[name] = stored
        self._history.append((self._version, kind, stored))
        for watch in self.watches:
            if _service(stored) in watch.services:
                watch.lines.put_nowait(_line(kind, stored))

    # -- faults ------------------------------------------------------------------------------------------------------

    def bookmark(self) -> None:
        """Send every watch the present version, and nothing else."""
        self._version += 1
        bookmark = {"kind": "EndpointSlice", "metadata": {"resourceVersion": str(self._version)}}
        for watch in self.watches:
            watch.lines.put_nowait(_line("BOOKMARK", bookmark))

    def drop_history(self, *, in_watches: bool) -> None:
        """Old versions are gone, as after compaction. in_watches: open watches report it too."""
        self._version += 1
        self._dropped = self._version
        self._history.clear()
        if in_watches:
            for watch in self.watches:
                watch.lines.put_nowait(_line("ERROR", _failure(410, "Expired", "too old resource version")))

    def send_line(self, line: bytes) -> None:
        """Any bytes into the open watches."""
        for watch in self.watches:
            watch.lines.put_nowait(line)

    def end_watches(self) -> None:
        for watch in self.watches:
            watch.lines.put_nowait(None)

    def break_watches(self) -> None:
        for watch in self.watches:
            if watch.transport is not None:
                watch.transport.abort()  # type: ignore[attr-defined]

    # -- answers -----------------------------------------------------------------------------------------------------

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self._runner is None and request.transport is not None:  # its connection was accepted before stop()
            request.transport.abort()
        if self.hangs:
            self.pending += 1
            await asyncio.Event().wait()
        if self.redirects_to is not None:
            raise web.HTTPTemporaryRedirect(self.redirects_to + request.path_qs)
        if self.status is not None:
            return web.json_response(_failure(self.status, "Fault", "as scripted"), status=self.status)
        if self.tokens and request.headers.get("authorization", "").removeprefix("Bearer ") not in self.tokens:
            self.refused += 1
            return web.json_response(_failure(401, "Unauthorized", "Unauthorized"), status=401)
        if request.match_info["namespace"] != self.namespace:
            return web.json_response(_failure(403, "Forbidden", "endpointslices is forbidden"), status=403)
        if request.method == "PATCH":
            return await self._patch(request)
        if request.path.endswith("/inferenceobjectives"):
            return self._list_objectives()
        selector = request.query["labelSelector"].removeprefix(SERVICE_LABEL)
        services = frozenset(selector.removeprefix(" in ").strip("=()").split(","))
        if request.query.get("watch", "0").lower() not in ("0", "false"):  # as an API server reads a boolean
            return await self._watch(request, services)
        self.lists += 1
        names = sorted(name for name, piece in self._slices.items() if _service(piece) in services)
        start = int(request.query.get("continue", "0"))
        end = start + min(self.page_items, int(request.query["limit"]))
        metadata = {"resourceVersion": str(self._version), **({"continue": str(end)} if end < len(names) else {})}
        items = [self._slices[name] for name in names[start:end]]
        return web.json_response({"kind": "EndpointSliceList", "metadata": metadata, "items": items})

    def _list_objectives(self) -> web.Response:
        if self.objectives is None:
            return web.json_response(_failure(404, "NotFound", "the server could not find the resource"), status=404)
        items = [
            {
                "metadata": {"name": name},
                "spec": {"poolRef": {"name": "pool"}, **({} if priority is None else {"priority": priority})},
            }
            for name, priority in self.objectives.items()
        ]
        return web.json_response({"kind": "InferenceObjectiveList", "metadata": {}, "items": items})

    async def _patch(self, request: web.Request) -> web.StreamResponse:
        pod = request.match_info["pod"]
        if not self.may_patch:
            return web.json_response(_failure(403, "Forbidden", f'pods "{pod}" is forbidden'), status=403)
        if pod not in self.annotations:
            return web.json_response(_failure(404, "NotFound", f'pods "{pod}" not found'), status=404)
        if request.content_type not in ("application/merge-patch+json", "application/strategic-merge-patch+json"):
            return web.json_response(_failure(415, "UnsupportedMediaType", request.content_type), status=415)
        self.patches += 1
        self.annotations[pod].update((await request.json())["metadata"]["annotations"])
        return web.json_response({"kind": "Pod", "metadata": {"name": pod, "annotations": self.annotations[pod]}})

    async def _watch(self, request: web.Request, services: frozenset[str]) -> web.StreamResponse:
        version = int(request.query["resourceVersion"])
        if version < self._dropped:
            self.expired += 1
            return web.json_response(_failure(410, "Expired", "too old resource version"), status=410)
        reply = web.StreamResponse(headers={"content-type": "application/json"})
        await reply.prepare(request)
        self.watch_versions.append(version)
        watch = _Watch(services, transport=request.transport)
        for at, kind, piece in self._history:
            if at > version and _service(piece) in services:
                watch.lines.put_nowait(_line(kind, piece))
        self.watches.add(watch)
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while (line := await watch.lines.get()) is not None:
                    half = len(line) // 2  # an event may come in two parts
                    await reply.write(line[:half])
                    await reply.write(line[half:])
        except TimeoutError:
            pass
        except ConnectionError:  # the client left
            return reply
        finally:
            self.watches.discard(watch)
        await reply.write_eof()
        return reply


def _service(piece: Slice) -> str:
    label: str = piece["metadata"]["labels"][SERVICE_LABEL]
    return label


def _line(kind: str, document: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": document}).encode() + b"\n"


def _failure(code: int, reason: str, message: str) -> dict[str, Any]:
    return {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}
