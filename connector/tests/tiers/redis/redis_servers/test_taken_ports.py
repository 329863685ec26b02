"""The servers of these tests start although another process takes a free port before they can bind it."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
import valkey_servers

from .conftest import Cluster, Process, free_port


@pytest.mark.parametrize("taken_call", [0, 1], ids=["clients' port", "cluster bus"])
def test_a_node_whose_port_was_taken_is_started_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken_call: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        calls = iter(range(100))
        taken = other.getsockname()[1]
        monkeypatch.setattr(
            sys.modules[Process.__module__], "free_port", lambda: taken if next(calls) == taken_call else free_port()
        )
        node = Cluster.start_node(tmp_path / "node")
    try:
        assert node.client.ping()
        assert node.port != taken
    finally:
        node.end()


def test_a_shared_server_whose_port_was_taken_is_started_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        ports = iter([taken, *(free_port() for _ in range(5))])
        monkeypatch.setattr(valkey_servers, "free_port", lambda: next(ports))
        server = valkey_servers.started_valkey()
    try:
        assert server.port != taken and server.is_running()
    finally:
        server.stop()


def test_a_named_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError, match="in use"):
        valkey_servers.started_valkey(other.getsockname()[1])
