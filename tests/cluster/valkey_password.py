"""The embedded Valkey's password, as docs/operations.md has an operator rotate it."""

from __future__ import annotations

import json
from collections.abc import Collection

from cluster.kube import Kubernetes, Object, name_of

SECRET = "redis-password"
FILE = "/var/lib/spillway/secrets/redis-password"
DOCTOR = "python3 -m spillway_ctl doctor --engine http://127.0.0.1:8100 --config /etc/spillway/engine.yaml --json"


def write_password(namespace: Kubernetes, password: str) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": {"password": password}}
    namespace.apply(secret)


def passwords_held(namespace: Kubernetes, engines: Collection[str]) -> set[str]:
    """What these pods would log in with."""
    return {namespace.execute(pod, "cat", FILE) for pod in engines}


def engines_log_in(namespace: Kubernetes, engines: Collection[str]) -> bool:
    """Whether `spillway doctor` can log in to the tier in each of these pods, and measure it."""
    for pod in engines:
        # Its exit status is 1 where any check failed.
        document = json.loads(namespace.execute(pod, "sh", "-c", f"{DOCTOR} || true"))
        (rates,) = (finding for finding in document["findings"] if finding["check"] == "tier rates")
        if rates["verdict"] not in ("ok", "warning"):
            return False
    return True


def takes_password(namespace: Kubernetes, valkey: Object, password: str) -> bool:
    """Asked in Valkey's own pod."""
    code = (
        "import socket\n"
        "with socket.create_connection(('127.0.0.1', 6379), timeout=10) as c:\n"
        f"  c.sendall(b'AUTH {password}\\r\\n'); print(c.recv(100).decode().split()[0])"
    )
    answer = namespace.execute(name_of(valkey), "python3", "-c", code).strip()
    assert answer in ("+OK", "-WRONGPASS"), answer
    return answer == "+OK"
