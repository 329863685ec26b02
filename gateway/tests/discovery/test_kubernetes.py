"""List and watch against a server that speaks the protocol over TLS, and everything that can happen to a watch."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from spillway_gateway.config.discovery import KubernetesDiscovery
from spillway_gateway.discovery import kubernetes_api
from spillway_gateway.discovery.endpoint_slices import Endpoint, EndpointSlice, Metadata, Port, WatchEvent
from spillway_gateway.discovery.found import FoundEngine, SourceFailed, SourceStatus
from spillway_gateway.discovery.kubernetes import FIRST_PAUSE_SECONDS, KubernetesSource, pause_seconds
from spillway_gateway.discovery.kubernetes_api import in_cluster_server
from spillway_gateway.testing.certificates import make_pair
from spillway_gateway.testing.fake_kubernetes import FakeKubernetes, endpoint_slice, pod_endpoint
from spillway_gateway.testing.running import until
from spillway_settings.roles import EngineRole

PORTS = {"http": 8100}


class Cluster:
    """An API server with TLS and tokens, and the files that a pod finds mounted."""

    def __init__(self, folder: Path) -> None:
        self.api = FakeKubernetes(tokens={"token-1"})
        certificate, key = make_pair("api")
        for name, content in (("ca.crt", certificate), ("tls.key", key)):
            (folder / name).write_bytes(content)
        (folder / "token").write_text("token-1\n")
        (folder / "namespace").write_text("spillway")
        self.folder = folder
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "ca.crt", folder / "tls.key")

    async def start(self) -> None:
        await self.api.start(self._context)

    @property
    def config(self) -> KubernetesDiscovery:
        return KubernetesDiscovery(
            "engines",
            retry_seconds_max=0.02,
            api_server=self.api.url,
            token_file=str(self.folder / "token"),
            ca_file=str(self.folder / "ca.crt"),
            namespace_file=str(self.folder / "namespace"),
        )

    def pods(self, *numbers: int, **conditions: Any) -> None:
        found = [pod_endpoint(f"vllm-{number}", f"10.0.0.{number}", **conditions) for number in numbers]
        self.api.put(endpoint_slice("engines-abc", found, PORTS))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path)
    await made.start()
    yield made
    await made.api.stop()


class Followed:
    def __init__(self) -> None:
        self.status = SourceStatus("test")
        self.published: list[tuple[FoundEngine, ...]] = []

    @property
    def names(self) -> list[str] | None:
        return [engine.config.name for engine in self.published[-1]] if self.published else None

    async def until_names(self, *names: str) -> None:
        await until(lambda: self.names == list(names))


@asynccontextmanager
async def followed(config: KubernetesDiscovery, **arguments: Any) -> AsyncIterator[Followed]:
    view = Followed()
    source = KubernetesSource(config, view.status, view.published.append, **arguments)
    task = asyncio.create_task(source.run())
    try:
        yield view
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_is_there_is_listed_and_what_changes_is_watched(cluster: Cluster) -> None:
    cluster.pods(0, 1)
    async with followed(cluster.config) as view:
        await view.until_names("vllm-0", "vllm-1")
        cluster.pods(0, 1, 2)
        await view.until_names("vllm-0", "vllm-1", "vllm-2")
        cluster.pods(0, ready=False, serving=True, terminating=True)
        await until(lambda: view.published[-1][0].withheld == "its pod is terminating")
        cluster.api.put(endpoint_slice("other", [pod_endpoint("vllm-9", "10.0.0.9")], PORTS))
        await view.until_names("vllm-0", "vllm-9")
        cluster.api.delete("engines-abc")
        await view.until_names("vllm-9")
        cluster.api.put(endpoint_slice("foreign", [pod_endpoint("x", "10.0.0.7")], PORTS, service="other-service"))
        cluster.api.delete("other")
        await view.until_names()
    assert cluster.api.lists == 1
    assert view.status.error is None and not view.status.failures


async def test_several_services_of_one_model_are_followed_as_one(cluster: Cluster) -> None:
    cluster.pods(0)
    config = replace(cluster.config, role=EngineRole.DECODE, role_services={"prompts": EngineRole.PREFILL})
    async with followed(config) as view:
        await view.until_names("vllm-0")
        cluster.api.put(endpoint_slice("p", [pod_endpoint("x", "10.0.0.7")], PORTS, service="prompts"))
        cluster.api.put(endpoint_slice("q", [pod_endpoint("y", "10.0.0.8")], PORTS, service="other-service"))
        cluster.pods(0, 1)
        await view.until_names("vllm-0", "vllm-1", "x")
        assert [engine.config.role for engine in view.published[-1]] == ["decode", "decode", "prefill"]
    assert cluster.api.lists == 1


async def test_a_list_in_pages_is_one_list(cluster: Cluster) -> None:
    cluster.api.page_items = 2
    for number in range(5):
        cluster.api.put(endpoint_slice(f"s{number}", [pod_endpoint(f"vllm-{number}", f"10.0.0.{number}")], PORTS))
    async with followed(cluster.config) as view:
        await view.until_names(*(f"vllm-{number}" for number in range(5)))
    assert len(view.published) == 1


async def test_a_watch_that_ends_goes_on_where_it_ended(cluster: Cluster) -> None:
    cluster.pods(0)
    async with followed(cluster.config) as view:
        await view.until_names("vllm-0")
        await until(lambda: len(cluster.api.watches) == 1)
        cluster.api.bookmark()
        cluster.api.end_watches()
        await until(lambda: len(cluster.api.watch_versions) == 2 and cluster.api.watches)
        first, second = cluster.api.watch_versions
        assert second == first + 1  # the bookmark's version, although no slice changed
        cluster.api.break_watches()
        cluster.pods(0, 1)
        await view.until_names("vllm-0", "vllm-1")
    assert cluster.api.lists == 1


@pytest.mark.parametrize("in_watches", [True, False], ids=["in the watch", "as a status"])
async def test_a_version_that_is_gone_means_listing_again(cluster: Cluster, in_watches: bool) -> None:
    cluster.pods(0)
    async with followed(cluster.config) as view:
        await view.until_names("vllm-0")
        await until(lambda: len(cluster.api.watches) == 1)
        if in_watches:
            cluster.pods(1)
            await view.until_names("vllm-1")
            cluster.api.drop_history(in_watches=True)
        else:
            cluster.api.break_watches()
            cluster.pods(1)
            cluster.api.drop_history(in_watches=False)
        await until(lambda: cluster.api.lists == 2 and cluster.api.watches)
        await view.until_names("vllm-1")
        cluster.pods(1, 2)
        await view.until_names("vllm-1", "vllm-2")
    assert view.status.failures["expired"] == 1
    assert cluster.api.expired == (0 if in_watches else 1)


async def test_an_api_server_that_is_away_changes_nothing(cluster: Cluster) -> None:
    cluster.pods(0, 1)
    async with followed(cluster.config) as view:
        await view.until_names("vllm-0", "vllm-1")
        await cluster.api.stop()
        await until(lambda: view.status.failures["unreachable"] >= 3)
        assert len(view.published) == 1 and view.status.error is not None
        cluster.pods(1)
        await cluster.start()
        await view.until_names("vllm-1")
        await until(lambda: view.status.error is None)


async def test_answers_that_are_no_answers_are_asked_for_again(cluster: Cluster) -> None:
    cluster.pods(0)
    cluster.api.status = 500
    async with followed(cluster.config) as view:
        await until(lambda: view.status.failures["refused"] >= 2)
        assert view.published == [] and "answers 500" in str(view.status.error)
        cluster.api.status = None
        await view.until_names("vllm-0")
        garbage = (
            b"}\n",
            b"[]\n",
            b'{"type":"ADDED"}\n',
            b'{"type":"ADDED","object":{"metadata":5}}\n',
            b'{"type":"NEW","object":{}}\n',
            b'{"type":"ERROR","object":{"code":500}}\n',
        )
        for number, line in enumerate(garbage, 1):
            await until(lambda number=number: len(cluster.api.watch_versions) == number)
            cluster.api.send_line(line)
            await until(
                lambda number=number: (view.status.failures["invalid"], cluster.api.lists) == (number, 1 + number)
            )
        cluster.api.status = 429
        cluster.api.break_watches()
        await until(lambda: "answers 429" in str(view.status.error))
        cluster.api.status = None
        cluster.pods(0, 1)
        await view.until_names("vllm-0", "vllm-1")


async def test_a_server_that_hangs_is_left_and_asked_again(cluster: Cluster) -> None:
    cluster.pods(0)
    cluster.api.hangs = True
    async with followed(replace(cluster.config, timeout_seconds=0.5)) as view:
        await until(lambda: view.status.failures["timeout"] >= 1)
        cluster.api.hangs = False
        # Half a second may be too short for a machine under load: then it is asked again, until it was in time.
        await view.until_names("vllm-0")


async def test_a_watch_that_is_not_answered_is_left_and_asked_again(cluster: Cluster) -> None:
    cluster.pods(0)
    async with followed(replace(cluster.config, timeout_seconds=1.0)) as view:
        await view.until_names("vllm-0")
        await until(lambda: cluster.api.watches)
        before = view.status.failures["timeout"]
        cluster.api.hangs = True
        cluster.api.end_watches()
        await until(lambda: view.status.failures["timeout"] > before)
        cluster.api.hangs = False
        cluster.pods(0, 1)
        await view.until_names("vllm-0", "vllm-1")


async def test_a_watch_may_be_quiet_for_longer_than_an_answer_may_take(cluster: Cluster) -> None:
    cluster.pods(0)
    api = kubernetes_api.KubernetesApi(cluster.config)
    quiet_seconds = await asyncio.to_thread(_read_timeout_of_a_watch, api)
    assert quiet_seconds == 60 + cluster.config.timeout_seconds


def _read_timeout_of_a_watch(api: kubernetes_api.KubernetesApi) -> float | None:
    found: list[float | None] = []

    def begun() -> None:
        assert api._socket is not None
        found.append(api._socket.gettimeout())
        api.stop()

    watch = api.watch(api.list()[1], 60, begun)
    with contextlib.suppress(SourceFailed):
        list(watch)
    return found[0]


async def test_a_token_that_changed_is_read_again(cluster: Cluster) -> None:
    cluster.pods(0)
    async with followed(cluster.config) as view:
        await view.until_names("vllm-0")
        await until(lambda: len(cluster.api.watches) == 1)
        cluster.api.tokens = {"token-2"}
        cluster.api.end_watches()
        await until(lambda: view.status.failures["unauthorized"] >= 1)
        cluster.pods(0, 1)
        (cluster.folder / "token").write_text("token-2")
        await view.until_names("vllm-0", "vllm-1")
    assert cluster.api.refused >= 1
    assert "token-" not in str(view.status.error)


async def test_everything_is_listed_again_when_the_time_has_come(cluster: Cluster) -> None:
    now = [0.0]
    cluster.pods(0)
    async with followed(cluster.config, clock=lambda: now[0]) as view:
        await view.until_names("vllm-0")
        await until(lambda: len(cluster.api.watches) == 1)
        now[0] = 299.0
        cluster.api.end_watches()
        await until(lambda: len(cluster.api.watch_versions) == 2 and cluster.api.watches)
        assert cluster.api.lists == 1
        now[0] = 301.0
        cluster.api.end_watches()
        await until(lambda: cluster.api.lists == 2)


async def test_what_is_missing_is_named(cluster: Cluster) -> None:
    for settings, message in (
        ({"namespace": "elsewhere"}, "allow get, list and watch of endpointslices"),
        ({"token_file": str(cluster.folder / "absent")}, "set tokenFile"),
        ({"namespace_file": str(cluster.folder / "absent")}, "set namespace"),
        ({"ca_file": str(cluster.folder / "absent")}, "caFile"),
        ({"ca_file": str(cluster.folder / "token")}, "caFile"),
        ({"api_server": "https://127.0.0.1:1"}, "cannot be reached"),
    ):
        async with followed(replace(cluster.config, **settings)) as view:
            await until(lambda: view.status.error is not None)
            assert message in str(view.status.error)


async def test_a_server_with_another_authority_gets_no_token(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "other.crt").write_bytes(make_pair("other")[0])
    async with followed(replace(cluster.config, ca_file=str(tmp_path / "other.crt"))) as view:
        await until(lambda: view.status.failures["unreachable"] >= 1)
        assert "certificate" in str(view.status.error).lower()
    assert cluster.api.lists == cluster.api.refused == 0


async def test_a_redirect_is_not_followed(cluster: Cluster) -> None:
    """The token belongs to the configured server."""
    other = FakeKubernetes()
    await other.start()
    cluster.api.redirects_to = other.url
    async with followed(cluster.config) as view:
        await until(lambda: view.status.failures["refused"] >= 1)
        assert "answers 307" in str(view.status.error)
    await other.stop()
    assert other.lists == 0


def discovery_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "kubernetes-discovery"}


async def test_a_quiet_watch_does_not_outlive_its_source(cluster: Cluster) -> None:
    before = discovery_threads()
    cluster.pods(0)
    async with followed(replace(cluster.config, timeout_seconds=300.0)) as view:
        await view.until_names("vllm-0")
        await until(lambda: cluster.api.watches)
        assert len(discovery_threads() - before) == 1
    await until(lambda: discovery_threads() <= before and not cluster.api.watches)


async def test_a_server_that_does_not_answer_delays_no_stop(cluster: Cluster) -> None:
    cluster.api.hangs = True
    async with asyncio.timeout(120):
        async with followed(replace(cluster.config, timeout_seconds=120.0)):
            await until(lambda: cluster.api.pending)
    await cluster.api.stop()  # ends the thread, which its deadline would end too


class EndlessApi:
    """Answers at once, and its watch never ends."""

    def __init__(self, config: KubernetesDiscovery) -> None:
        pass

    def list(self) -> tuple[dict[str, EndpointSlice], str]:
        return {}, "1"

    def watch(self, version: str, seconds: int, begun: Callable[[], None]) -> Iterator[WatchEvent]:
        while True:
            yield WatchEvent("BOOKMARK", "2", None)

    def stop(self) -> None:
        pass


async def test_updates_are_bounded_and_a_full_queue_does_not_keep_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_api, "KubernetesApi", EndlessApi)
    before = discovery_threads()
    source = KubernetesSource(KubernetesDiscovery("engines"), SourceStatus("test"), lambda engines: None)
    task = asyncio.create_task(source.run())
    await asyncio.sleep(0)
    while not source._updates.full():  # the event loop is to stand still
        time.sleep(0.001)  # noqa: ASYNC251
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: discovery_threads() <= before)


class RestartedApi:
    """API server that is away from the end of its first watch until `back_at`, and then has lost the history: an older
    watch expires. Calls take no time; only pauses do."""

    def __init__(self, back_at: float) -> None:
        self.back_at = back_at
        self.now = 0.0
        self.pauses: list[float] = []
        self.tries_away = 0
        self.versions: list[str] = []  # where each watch began
        self._versions = iter(["old", "new"])
        self._stopped = threading.Event()

    def pause(self, stopping: threading.Event, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def list(self) -> tuple[dict[str, EndpointSlice], str]:
        version = next(self._versions)
        endpoints = [] if version == "old" else [Endpoint(["10.0.0.1"])]
        piece = EndpointSlice(Metadata("engines-abc", version), endpoints=endpoints, ports=[Port("http", 8100, "TCP")])
        return {"engines-abc": piece}, version

    def watch(self, version: str, seconds: int, begun: Callable[[], None]) -> Iterator[WatchEvent]:
        self.versions.append(version)
        if len(self.versions) == 1:
            begun()
            raise SourceFailed("unreachable", "the connection broke")
        if self.now < self.back_at:
            self.tries_away += 1
            raise SourceFailed("unreachable", "connection refused")
        begun()
        if version == "old":
            raise SourceFailed("expired", "too old resource version")
        self._stopped.wait(60.0)
        return iter(())

    def stop(self) -> None:
        self._stopped.set()


@given(st.floats(0.0, 120.0), st.floats(0.0, 1.0))
async def test_a_change_during_an_outage_is_seen_one_pause_after_the_api_server_is_back(
    outage_seconds: float, chance: float
) -> None:
    api = RestartedApi(outage_seconds)
    config = KubernetesDiscovery("engines")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_api, "KubernetesApi", lambda config: api)
        async with followed(config, chance=lambda: chance, clock=lambda: api.now, pause=api.pause) as view:
            await view.until_names("10.0.0.1")
            await until(lambda: api.versions[-1] == "new")

    assert api.now - outage_seconds <= config.retry_seconds_max
    assert view.status.failures["expired"] == 1
    # Gentle: after the first few, one try in half a second at most.
    assert api.tries_away <= 4 + outage_seconds / (config.retry_seconds_max / 2)


class ForgetfulApi(RestartedApi):
    """An API server whose history is always too short, even for the list that it has just given."""

    def list(self) -> tuple[dict[str, EndpointSlice], str]:
        return {}, "1"

    def watch(self, version: str, seconds: int, begun: Callable[[], None]) -> Iterator[WatchEvent]:
        self.versions.append(version)
        raise SourceFailed("expired", "too old resource version")


async def test_a_server_that_forgets_at_once_is_asked_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ForgetfulApi(0.0)
    monkeypatch.setattr(kubernetes_api, "KubernetesApi", lambda config: api)
    async with followed(KubernetesDiscovery("engines"), chance=lambda: 0.0, pause=api.pause):
        await until(lambda: len(api.pauses) >= 5)
    assert api.pauses[:5] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert len(api.versions) <= len(api.pauses) + 1  # no try without a pause before it


CONFIGURED = """
import asyncio, sys
from spillway_gateway import app
from spillway_gateway.config.discovery import DiscoveryConfig, DnsDiscovery, KubernetesDiscovery
from spillway_gateway.discovery import sources
from spillway_gateway.discovery.found import SourceStatus

async def follow(config):
    status = SourceStatus("")
    task = asyncio.create_task(sources.follow(config, status, lambda engines: None))
    while not status.failures:
        await asyncio.sleep(0.01)
    task.cancel()

dns = DnsDiscovery("engines.invalid", nameservers=("127.0.0.1:1",), timeout_seconds=0.1)
asyncio.run(follow(DiscoveryConfig(dns=dns)))
assert "kubernetes" not in sys.modules
asyncio.run(follow(DiscoveryConfig(kubernetes=KubernetesDiscovery("engines", "x", api_server="http://127.0.0.1:1"))))
assert "kubernetes" in sys.modules
"""


def test_the_client_package_is_loaded_with_kubernetes_discovery_alone() -> None:
    done = subprocess.run([sys.executable, "-c", CONFIGURED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_the_environment_names_the_api_server() -> None:
    given = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}

    assert in_cluster_server(given) == "https://[fd00::1]:6443"
    assert in_cluster_server({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}) == "https://10.96.0.1:443"
    assert in_cluster_server({}) == "https://kubernetes.default.svc:443"


@given(st.integers(1, 10_000), st.floats(0.1, 600), st.floats(0, 1))
def test_pauses_grow_within_their_bound_and_are_never_zero(failures: int, most: float, chance: float) -> None:
    pause = pause_seconds(failures, most, chance)

    assert min(most, FIRST_PAUSE_SECONDS) / 2 <= pause <= most
    assert pause <= pause_seconds(failures + 1, most, chance)
    assert pause_seconds(failures, most, 1.0) <= pause <= pause_seconds(failures, most, 0.0)
