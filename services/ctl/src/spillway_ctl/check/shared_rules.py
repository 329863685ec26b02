"""Rules that hold at several settings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from spillway_ctl.check.finding import Finding


class Scaling(Protocol):
    @property
    def enabled(self) -> bool: ...

    @property
    def min_replicas(self) -> int: ...

    @property
    def max_replicas(self) -> int: ...


class Login(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def username_key(self) -> str: ...


def replica_bounds(at: str, scaling: Scaling) -> Iterator[Finding]:
    if scaling.enabled and scaling.min_replicas > scaling.max_replicas:
        yield Finding(
            at,
            f"minReplicas: {scaling.min_replicas} is more than maxReplicas: {scaling.max_replicas}",
            "lower the first or raise the second",
        )


def login(at: str, secret: Login) -> Iterator[Finding]:
    if secret.username_key and not secret.name:
        yield Finding(
            f"{at}.usernameKey",
            f"{secret.username_key}, but existingSecret.name is empty",
            "name the Secret, or remove usernameKey",
        )


def distinct_folders(at: str, mounts: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    mounted: set[str] = set()
    for mount in mounts:
        folder = mount["mountPath"].removesuffix("/")
        if folder in mounted:
            yield Finding(at, f"{mount['mountPath']} is given twice", "mount each volume at a folder of its own")
        mounted.add(folder)


def propagation(at: str, mount: Mapping[str, Any], *, is_privileged: bool) -> Iterator[Finding]:
    if mount.get("mountPropagation") == "Bidirectional" and not is_privileged:
        yield Finding(
            at,
            f"mountPropagation: Bidirectional of {mount['name']} is for privileged containers alone",
            "set HostToContainer, or remove it",
        )
