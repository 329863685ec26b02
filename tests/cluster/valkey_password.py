"""The embedded Valkey's password, as docs/operations.md has an operator rotate it."""

from __future__ import annotations

import json
from collections.abc import Collection

from cluster.kube import Kubernetes, Object, name_of
from stack_driver.deadlines import eventually

SECRET = "redis-password"
FILE = "/var/lib/spillway/secrets/redis-password"
DOCTOR = "python3 -m spillway_ctl doctor --engine http://127.0.0.1:8100 --config /etc/spillway/engine.yaml --json"
LOGIN_SECONDS = 300.0


def write_password(namespace: Kubernetes, password: str) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": {"password": password}}
    namespace.apply(secret)


def passwords_held(namespace: Kubernetes, engines: Collection[str]) -> set[str]:
    """Return the passwords with which these pods would log in."""
    return {namespace.execute(pod, "cat", FILE) for pod in engines}


def refused_logins(namespace: Kubernetes, engines: Collection[str]) -> list[str]:
    """The pods in which `spillway doctor` cannot log in to the tier and measure it, each with its words."""
    refused = []
    for pod in engines:
        # Its exit status is 1 where any check failed.
        document = json.loads(namespace.execute(pod, "sh", "-c", f"{DOCTOR} || true"))
        (rates,) = (finding for finding in document["findings"] if finding["check"] == "tier rates")
        if rates["verdict"] not in ("ok", "warning"):
            refused.append(f"{pod}: {rates['verdict']}, {rates['found']}")
    return refused


def wait_for_logins(namespace: Kubernetes, engines: Collection[str]) -> None:
    """Wait until each of these pods can log in. Generous: Valkey starts again, and each question is a process in a
    pod."""
    last: list[str] = []

    def all_in() -> bool:
        last[:] = refused_logins(namespace, engines)
        return not last

    try:
        eventually("the engines log in", all_in, LOGIN_SECONDS)
    except AssertionError as error:
        pods = namespace.kubectl("get", "pods", "-o", "wide")
        raise AssertionError(f"{error}; {last}\n{pods}") from None


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
