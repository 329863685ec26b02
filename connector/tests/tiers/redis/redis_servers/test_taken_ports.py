"""The servers of these tests start although another process takes a free port before they can bind it."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

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
